package dataplane

import (
	"context"
	"net/netip"

	"github.com/fairlead/fairlead/internal/svc"
)

// Lost counts the packets to one destination that reached no endpoint.
type Lost struct {
	Protocol svc.Protocol
	// To is where they were sent to: for a node port an address of the node.
	To netip.AddrPort
	// Refused packets were answered with a refusal, Dropped ones not at all.
	Refused, Dropped uint64
}

// Counter is a Plane that counts what it refuses and drops. Lost may be called
// at any time, beside the other methods. A destination's count may begin anew
// after a time without such packets.
type Counter interface {
	Lost(ctx context.Context) ([]Lost, error)
}
