"""Environments and tools of other systems: MCP, OpenEnv, textarena, gymnasium and verl."""
