package dataplane

import (
	"context"
	"net/netip"

	"github.com/fairlead/fairlead/internal/svc"
)

// DropCount counts the packets to one destination that reached no endpoint.
type DropCount struct {
	Protocol svc.Protocol
	// To is where they were sent to: for a node port an address of the node.
	To netip.AddrPort
	// Rejected packets were answered with a TCP reset or an ICMP error, Dropped
	// ones not at all.
	Rejected, Dropped uint64
}

// Counter is an Applier that counts the packets it rejects and drops. Drops may be
// called at any time, beside the other methods. A destination's count may restart
// at 0 after a day without such packets.
type Counter interface {
	Drops(ctx context.Context) ([]DropCount, error)
}
