"""What composes and deploys the product: the Serve application (`app`), its adapters to Ray Serve and the
command `epdg` (`serving`), whole clusters in virtual time and the planner (`simulator`), configurations, the
image, the chart and the demo model. It imports the packages of the product, and none of them imports it."""
