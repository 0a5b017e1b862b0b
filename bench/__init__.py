"""Benchmarks, load generators and audits: README.md says which command measures what. No service imports this
package.
"""
