package apiserver

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/apiserver/rotation"
)

// certReport is what this server reports about its certificates to the other servers.
func (s *Server) certReport() pki.Report {
	r := s.creds.Report()
	if s.peering != nil {
		r.Peers = s.peering.TrustedAtStart()
	}
	return r
}

// serverNamed names a server by its URL in reports.
func serverNamed(url string) string { return "server " + strings.TrimPrefix(url, "https://") }

// newRotation returns the rotation of the cluster's authority, as far as it is this server's.
func (a *assembly) newRotation() *rotation.Rotation {
	o := rotation.Options{
		Client: a.client, PKI: a.creds.PKI, Nodes: a.shared.Core().V1().Nodes().Lister(), Self: serverNamed(a.publicURL()),
		Report: a.certReport, Servers: a.keeper.others, Log: a.log,
		Changed: func(ctx context.Context) error {
			err := a.creds.Refresh()
			a.guard.Keeper.Refresh()
			return errors.Join(err, a.ensureCluster(ctx, a.client), a.ensureToken(ctx, a.client),
				a.keeper.renew(ctx)) // with the new report
		},
	}
	if a.peering != nil {
		o.Members = func() (out []string) {
			for _, server := range a.store.Servers() {
				out = append(out, serverNamed(server))
			}
			return out
		}
		o.Restart = func(ctx context.Context, first []string) error {
			err := a.store.Restart(ctx, func(server string) bool { return slices.Contains(first, serverNamed(server)) })
			if err != nil {
				return err
			}
			return a.keeper.renew(ctx) // with the new report
		}
	}
	return rotation.New(o)
}
