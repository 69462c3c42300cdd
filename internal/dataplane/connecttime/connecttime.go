// Package connecttime is mode nft with connect-time in front: connections of this node's own clients are
// translated when they are made, and everything else by nft. See README.md.
package connecttime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// ErrBalance is the error of New for balance roundrobin: the programs choose at random.
var ErrBalance = errors.New("connect-time chooses endpoints at random: leave --balance away, or --connect-time off")

// Mode is the dataplane.Applier: nft's Reconciler with a second Target for each family, and all else that nft can do.
type Mode struct {
	*nft.Mode
	programs *connect.Programs
	clients  *connect.Clients
	detours  *detours
	// stop ends the sweeper and waits for it.
	stop func()
}

// New returns a Mode for the network namespace of the calling thread. Programs of an earlier process go on until the first
// Apply has written everything.
func New(of nft.Config, cfg connect.Config, log *slog.Logger) (*Mode, error) {
	if of.Balance != dataplane.Random {
		return nil, ErrBalance
	}
	programs, err := connect.Open(cfg)
	if err != nil {
		return nil, err
	}
	clients, err := programs.Clients(log)
	if err != nil {
		return nil, errors.Join(err, programs.Close())
	}
	behind, err := nft.New(of)
	if err != nil {
		return nil, errors.Join(err, clients.Close(), programs.Close())
	}
	if err := programs.Unable(); err != nil {
		log.Warn("connect-time leaves connected sockets of UDP to the packet filter", "err", err)
	}
	d, err := newDetours()
	if err != nil {
		return nil, errors.Join(err, behind.Close(), clients.Close(), programs.Close())
	}
	s := newShared(programs, d, clients, log, socket.Families(), programs.Attach)
	m := &Mode{Mode: behind, programs: programs, clients: clients, detours: d, stop: s.sweeper.start()}
	for _, f := range socket.Families() {
		m.Add(f, &target{shared: s, family: f})
	}
	return m, nil
}

// Dump is nft's, and what the programs have.
func (m *Mode) Dump(ctx context.Context) (string, error) {
	text, err := m.Mode.Dump(ctx)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(text)
	if err := dump(&b, m.programs); err != nil {
		return "", fmt.Errorf("connect-time: %w", err)
	}
	return b.String(), nil
}

// Close releases what this process holds. Rules and programs stay.
func (m *Mode) Close() error {
	m.stop()
	return errors.Join(m.detours.close(), m.clients.Close(), m.programs.Close(), m.Mode.Close())
}
