"""The SDK: clients over HTTP or in this process, under the names and with the semantics of the official one."""
