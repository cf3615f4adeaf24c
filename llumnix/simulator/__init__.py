"""A cluster without models: traces replayed on simulated engines under the live policies.

Time is virtual and goes from event to event: between two changes of an engine's batch its decode steps are one closed
formula. Policies are the very functions of llumnix/policies; what is simulated is the engine below them and the cost
of moving.
"""
