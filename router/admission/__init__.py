"""Admission control: which requests start now, which wait, and which are refused.

entrance     requests that wait, as futures on the event loop
queue        the decision, made of `admitted` and `fair_queue`
admitted     what admitted requests hold, and whether another one fits
fair_queue   the order of the requests that wait: fair shares between classes and tenants
answers      what admission is told and what it answers
"""
