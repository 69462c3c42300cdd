// Package connecttime has connect-time in front of mode nft or iptables: connections of this node's own clients are
// translated when they are made, and everything else by the rules of the mode. See README.md.
package connecttime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
)

// ErrBalance is the error of the constructors for balance roundrobin: the programs choose at random.
var ErrBalance = errors.New("connect-time chooses endpoints at random: leave --balance away, or --connect-time off")

// Probe returns why the programs, or the rules of detours, cannot work on this machine. It leaves nothing in the kernel.
func Probe(cfg connect.Config) error {
	if err := connect.Probe(cfg); err != nil {
		return err
	}
	return probeDetours()
}

// NFT is the dataplane.Applier: nft's Reconciler with a second Target for each family, and all else that nft can do.
type NFT struct {
	*nft.Mode
	*programs
}

// New returns an NFT for the network namespace of the calling thread. Programs of an earlier process go on until the first
// Apply has written everything.
func New(of nft.Config, cfg connect.Config, log *slog.Logger) (*NFT, error) {
	if of.Balance != dataplane.Random {
		return nil, ErrBalance
	}
	behind, err := nft.New(of)
	if err != nil {
		return nil, err
	}
	p, err := openPrograms(cfg, log, behind.Add)
	if err != nil {
		return nil, errors.Join(err, behind.Close())
	}
	return &NFT{behind, p}, nil
}

// Dump is nft's, and what the programs have.
func (m *NFT) Dump(ctx context.Context) (string, error) { return m.dump(m.Mode.Dump(ctx)) }

// Close releases what this process holds. Rules and programs stay.
func (m *NFT) Close() error { return errors.Join(m.close(), m.Mode.Close()) }

// IPTables is the dataplane.Applier: that of mode iptables with a second Target for each family, and all else that the mode
// can do.
type IPTables struct {
	*iptables.Mode
	*programs
}

// NewIPTables is New in front of mode iptables.
func NewIPTables(of iptables.Config, cfg connect.Config, log *slog.Logger) (*IPTables, error) {
	if of.Balance != dataplane.Random {
		return nil, ErrBalance
	}
	of.AcceptEstablished = true
	behind, err := iptables.New(of)
	if err != nil {
		return nil, err
	}
	p, err := openPrograms(cfg, log, behind.Add)
	if err != nil {
		return nil, errors.Join(err, behind.Close())
	}
	return &IPTables{behind, p}, nil
}

// Dump is that of mode iptables, and what the programs have.
func (m *IPTables) Dump(ctx context.Context) (string, error) { return m.dump(m.Mode.Dump(ctx)) }

// Close releases what this process holds. Rules and programs stay.
func (m *IPTables) Close() error { return errors.Join(m.close(), m.Mode.Close()) }

// programs is what is in front of a mode.
type programs struct {
	kernel  *connect.Programs
	clients *connect.Clients
	detours *detours
	// stop ends the sweeper and waits for it.
	stop func()
}

// openPrograms gives a mode's Reconciler a Target of the programs for each family, by add.
func openPrograms(cfg connect.Config, log *slog.Logger, add func(svc.Family, dataplane.Target)) (*programs, error) {
	k, err := connect.Open(cfg)
	if err != nil {
		return nil, err
	}
	clients, err := k.Clients(log)
	if err != nil {
		return nil, errors.Join(err, k.Close())
	}
	if err := k.Unable(); err != nil {
		log.Warn("connect-time leaves connected sockets of UDP to the packet filter", "err", err)
	}
	d, err := newDetours()
	if err != nil {
		return nil, errors.Join(err, clients.Close(), k.Close())
	}
	s := newShared(k, d, clients, log, socket.Families(), k.Attach)
	for _, f := range socket.Families() {
		add(f, &target{shared: s, family: f})
	}
	return &programs{kernel: k, clients: clients, detours: d, stop: s.sweeper.start()}, nil
}

// dump adds what the programs have to the text of the mode.
func (p *programs) dump(text string, err error) (string, error) {
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(text)
	if err := dump(&b, p.kernel); err != nil {
		return "", fmt.Errorf("connect-time: %w", err)
	}
	return b.String(), nil
}

func (p *programs) close() error {
	p.stop()
	return errors.Join(p.detours.close(), p.clients.Close(), p.kernel.Close())
}
