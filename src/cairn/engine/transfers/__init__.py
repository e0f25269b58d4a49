"""Pages from and to other servers. The door: `build.build_transfer`."""
