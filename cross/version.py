"""The one place that holds the version: the distribution, the manifest and `taste-train info` all say this."""

VERSION = "0.1.0"
