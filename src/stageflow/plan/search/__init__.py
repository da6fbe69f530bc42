"""Finds schedules: fast trials of very many orders, with the proof how good the best one is."""

from stageflow.plan.search.find import Found, find_schedule

__all__ = ["Found", "find_schedule"]
