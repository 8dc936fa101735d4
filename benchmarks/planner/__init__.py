"""How well the planner predicts published runs that its constants were not fitted to."""
