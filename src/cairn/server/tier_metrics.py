"""What `/metrics` has of tiers below the pool: rows as those of `cairn.server.metrics`."""

TIER_COUNTERS: tuple[tuple[str, ...], ...] = (
    ("cairn:tier_hits", "tiers.hits", "Requests of which a tier had what the pool had not.", "tier"),
    ("cairn:tier_hit_tokens", "tiers.hit_tokens", "Prompt tokens that came from a tier.", "tier"),
    ("cairn:tier_read_bytes", "tiers.read_bytes", "Bytes read from a tier.", "tier"),
    ("cairn:tier_read_seconds", "tiers.read_seconds", "Seconds that reading from a tier has taken.", "tier"),
    ("cairn:tier_written_bytes", "tiers.written_bytes", "Bytes written to a tier.", "tier"),
    ("cairn:tier_write_seconds", "tiers.write_seconds", "Seconds that writing to a tier has taken.", "tier"),
    (
        *("cairn:tier_drops", "tiers.drops", "Entries of a tier that are gone or never came, by why."),
        *("tier", "reason"),
    ),
    ("cairn:tier_skipped_paths", "tiers.skipped", "Paths of the pool that were copied to no tier, by why.", "reason"),
)
TIER_GAUGES: tuple[tuple[str, ...], ...] = (
    ("cairn:tier_bytes", "tiers.num_bytes", "Bytes that a tier takes of memory or disk.", "tier"),
    ("cairn:tier_entries", "tiers.num_entries", "Chunks of keys and values, and states, in a tier.", "tier"),
)
