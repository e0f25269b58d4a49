"""KV transfer to and from other servers. The door: `kv_transfer`."""
