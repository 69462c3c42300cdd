package rotation

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// An etcd reads the authorities of its peers once, at its start. While a rotation goes on that is enough: whoever knows
// only the old one verifies what the new one has signed by the cross certificate. At the end the old one
// is still trusted, until the etcd starts again. One server at a time has its turn, in the order of their names,
// and only while all run: so no two are away at once, and no lock is left behind by one that dies.

// restart restarts the embedded etcd of this server if it has its turn.
func (r *Rotation) restart(ctx context.Context) error {
	look, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	servers, err := r.o.Servers(look)
	if err != nil {
		return err
	}
	if missing := r.absent(servers); len(missing) > 0 {
		return errors.New("the embedded etcd still trusts the authority that was removed, and is restarted when all servers are up: " +
			strings.Join(missing, "; "))
	}
	var done []string
	for name, report := range servers {
		switch {
		case !report.PeersBehind():
			done = append(done, name)
		case name < r.o.Self:
			return nil
		}
	}
	r.o.Log.Info("restarting the embedded etcd, which still trusts the authority that was removed", "done", done)
	return r.o.Restart(ctx, done)
}

// absent returns which members are not among the servers that run, this one aside.
func (r *Rotation) absent(running map[string]pki.Report) (out []string) {
	for _, name := range r.o.Members() {
		if report, runs := running[name]; !runs && name != r.o.Self {
			out = append(out, name+" is down: start it, or remove it with 'fairlead server remove'")
		} else if runs && len(report.Peers) == 0 {
			out = append(out, name+" does not report what its etcd trusts: it has an earlier version")
		}
	}
	return out
}

// behind returns the servers whose etcds still trust a removed authority.
func behind(all map[string]pki.Report) (out []string) {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if all[name].PeersBehind() {
			out = append(out, name+"'s etcd still trusts the authority that was removed; it is restarted in its turn")
		}
	}
	return out
}
