"""Pictures of the boards, from a cluster under load.

prometheus     Prometheus next to a cluster, and its answers
chart, page    a panel as SVG, a board as HTML; pure
ray_dashboard  what Ray itself shows
__main__       the load, and all of it together
"""
