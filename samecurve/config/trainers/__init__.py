"""Configurations of other trainers, and the recipes that they become."""
