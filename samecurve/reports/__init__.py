"""Pictures and pages of what was measured. May import metrics and what is below it, not engines."""
