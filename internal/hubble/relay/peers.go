package relay

import (
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/status"

	"github.com/fairlead/fairlead/internal/hubble/api/peer"
)

// peersPeriod is how often a client that watches the nodes is told of changes.
const peersPeriod = 5 * time.Second

// Notify is part of peer.PeerServer: it names the nodes with the addresses of their agents, and then each change, which it looks for
// every peersPeriod. It takes the place of a client that follows flows.
func (r *Relay) Notify(_ *peer.NotifyRequest, to peer.Peer_NotifyServer) error {
	done, err := r.follows.Take()
	if err != nil {
		return err
	}
	defer done()
	ctx, known := to.Context(), map[string]string{}
	for {
		now, err := r.addresses(ctx)
		switch {
		case err == nil:
			for _, m := range changes(known, now) {
				if err := to.Send(m); err != nil {
					return err
				}
			}
			known = now
		case len(known) == 0:
			return err
		}
		if !sleep(ctx, r.peers) {
			return status.FromContextError(context.Cause(ctx)).Err()
		}
	}
}

// addresses are where the nodes are asked, by their names.
func (r *Relay) addresses(ctx context.Context) (map[string]string, error) {
	list, err := r.list(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for i := range list {
		out[list[i].Name] = r.nodes.Address(&list[i])
	}
	return out, nil
}

// changes are what has changed of the addresses of nodes, by their names.
func changes(before, now map[string]string) (out []*peer.ChangeNotification) {
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if _, there := now[name]; !there {
			out = append(out, &peer.ChangeNotification{Name: name, Address: before[name], Type: peer.ChangeNotificationType_PEER_DELETED})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(now)) {
		m := &peer.ChangeNotification{Name: name, Address: now[name], Tls: &peer.TLS{ServerName: name}}
		switch address, there := before[name]; {
		case !there:
			m.Type = peer.ChangeNotificationType_PEER_ADDED
		case address != now[name]:
			m.Type = peer.ChangeNotificationType_PEER_UPDATED
		default:
			continue
		}
		out = append(out, m)
	}
	return out
}
