"""Admission control: which requests start now, which wait, and which are refused.

controller   keeps the waiting requests for the request flow, and limits errors in the queue to one request
queue        the decision, made of `admitted` and `fair_queue`
admitted     what admitted requests hold, and whether another one fits
fair_queue   the order of the requests that wait: fair shares between classes and tenants
answers      what admission is told and what it answers
"""
