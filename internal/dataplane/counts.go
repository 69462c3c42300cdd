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

// ServedCount counts the connections to one frontend that were sent to one endpoint.
type ServedCount struct {
	Protocol svc.Protocol
	// NodePort reports that To is a node port, with the unspecified address.
	NodePort bool
	// To is where the clients sent to.
	To netip.AddrPort
	// Endpoint is where the connections went.
	Endpoint netip.AddrPort
	// Connections are new connections, or UDP flows that connection tracking takes for new. They are
	// counted when the first packet leaves for the endpoint; if that is lost, its repetition is counted again.
	Connections uint64
}

// ServedCounter is an Applier that counts the connections to each endpoint. Served may be called at any time, beside the
// other methods. A count may restart at 0 after a day without such connections, and a pair of frontend and endpoint may be
// missing where the Applier has no room for more.
type ServedCounter interface {
	Served(ctx context.Context) ([]ServedCount, error)
}
