// Package drain follows the connections of kube-proxy's mode ipvs on the node that it runs on, for 'fairlead migrate'. IPVS has its own
// table of connections, which ends with its rules; new connections meet the rules of fairlead proxy before it.
package drain

import (
	"context"
	"fmt"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
)

// attempts are this far apart.
const attempts = time.Second

// Left is what goes on through IPVS.
type Left struct {
	// Open is the number of connections of TCP and SCTP, and One of them.
	Open int
	One  ipvs.Connection
}

// String describes connections for people.
func (l *Left) String() string {
	switch l.Open {
	case 0:
		return "no connection goes through IPVS"
	case 1:
		return fmt.Sprintf("1 connection goes through IPVS, from %s to %s", l.One.Client, l.One.Virtual)
	}
	return fmt.Sprintf("%d connections go through IPVS, such as from %s to %s", l.Open, l.One.Client, l.One.Virtual)
}

// IPVS waits until no connection of TCP or SCTP goes through IPVS, for the given time at most, and returns what is left. Before, it has
// the kernel forget where IPVS led the datagrams of UDP, so that the next ones meet the rules of fairlead proxy. It works in the network
// namespace of the process.
func IPVS(ctx context.Context, within time.Duration) (Left, error) {
	if err := forget(ctx); err != nil {
		return Left{}, err
	}
	deadline := time.NewTimer(within)
	defer deadline.Stop()
	again := time.NewTicker(attempts)
	defer again.Stop()
	for {
		left, err := look()
		if err != nil || left.Open == 0 {
			return left, err
		}
		select {
		case <-ctx.Done():
			return left, ctx.Err()
		case <-deadline.C:
			return left, nil
		case <-again.C:
		}
	}
}

func look() (out Left, err error) {
	err = ipvs.Connections(func(c ipvs.Connection) {
		if c.Open() {
			out.Open++
			out.One = c
		}
	})
	return out, err
}

// forget deletes the entries of connection tracking by which IPVS leads datagrams on.
func forget(ctx context.Context) error {
	conn, err := conntrack.Dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_, err = conn.Sweep(ctx, conntrack.Scope{Protocol: svc.UDP}, func(e conntrack.Entry) bool { return e.Translated() && !e.Marked })
	return err
}
