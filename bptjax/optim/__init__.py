"""The optimizer: update rules, schedules, the loss scale of float16."""
