"""The lease protocol: the owner of memory grants a writer some blocks, the writer fills them and says so,
once.

transfer           what a service sees: `BlockTransfer`, `OutgoingLease`
transfer_engine    the transfer thread: agent, sender, receiver
events             the ends of leases, delivered to the owner of a transfer engine

receiver           the owner's half: opens leases, fences blocks, checks what arrives
  processes          whether a writer's process has ended
sender             the writer's half: takes up grants, keeps the table of open leases
  outgoing           a lease as the caller sees it; any thread
  lease_writer       a lease on the agent's thread: post, wait, notify
  prompt_places      where the blocks of prompts lie in a grant
  group_coding       which groups of a lease travel coded
  link_meter         connections to owners, and how fast they are
memories           of both sides, with their wire memories; checks and decodes what arrives
envelope           the notification that ends a lease; the contract of both sides

group              rank 0 of a worker with several ranks: one lease over all of them
  rank_follower      the other ranks, and what runs through their pipes
"""
