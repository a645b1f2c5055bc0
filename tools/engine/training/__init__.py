"""Train by MMEngine's Runner: settings, hooks, loops, schedules and logs."""
