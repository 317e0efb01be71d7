"""A simulated step as pictures and pages show it, as people read it in a terminal, and as JSON."""

from fourfold.report.simulation.as_json import simulation_json
from fourfold.report.simulation.page import path_split, rank_heat_maps, simulation_page, step_split
from fourfold.report.simulation.tables import pipeline_table, time_table, what_if_table
from fourfold.report.simulation.text import print_simulation, simulation_text
from fourfold.report.simulation.timeline import simulation_timeline, worst_replica

__all__ = [
    "path_split",
    "pipeline_table",
    "print_simulation",
    "rank_heat_maps",
    "simulation_json",
    "simulation_page",
    "simulation_text",
    "simulation_timeline",
    "step_split",
    "time_table",
    "what_if_table",
    "worst_replica",
]
