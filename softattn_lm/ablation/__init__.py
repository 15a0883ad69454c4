"""ROOM 8: from a question to a table with intervals. A planner above executors, statistics, and a report."""
