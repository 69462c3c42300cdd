package parts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/connecttime"
	"github.com/fairlead/fairlead/internal/dataplane/direct"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/ipvs"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/dataplane/userspace"
	kconnect "github.com/fairlead/fairlead/internal/kernel/connect"
	kiptables "github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/preflight"
	"github.com/fairlead/fairlead/internal/proxy"
)

// proxyMode is a mode of the proxy.
type proxyMode struct {
	name string
	// auto is set if --mode auto may choose it; the first in the table that works
	// is chosen.
	auto bool
	// fallback names the modes to try, in this order, where this one does not
	// work.
	fallback []string
	// probe returns why the mode cannot work on this machine. It leaves nothing
	// in the kernel. What it finds out is kept in the modeSetup.
	probe func(context.Context, *modeSetup) error
	// open completes options for the mode after a successful probe. It has no
	// effect on the kernel.
	open func(*modeSetup, *proxy.Options) error
	// connect is open with connect-time in front, nil if that is not possible.
	connect func(*modeSetup, *proxy.Options) error
	// cleanup removes what the mode wrote to the kernel.
	cleanup func(context.Context) error
	// guards is set if the mode keeps other machines from 127.0.0.0/8 while that is routed
	// (dataplane.Settings.Guard).
	guards bool
	// noMesh is why connections to ClusterIPs cannot be led to routes beside this mode, "" if they can. Then present reports whether
	// it runs on this machine, by whatever process.
	noMesh  string
	present func(context.Context) (bool, error)
	// logs is set if the mode logs packets that reach no endpoint.
	logs bool
}

// firstAtClusterIPs is the noMesh of IPVS, also of kube-proxy's.
const firstAtClusterIPs = "which is the first to get the packets to ClusterIPs"

// proxyModes are the modes. All else that depends on which there are derives
// from this table.
func proxyModes() []proxyMode {
	return []proxyMode{
		{name: "nft", auto: true, guards: true, logs: true, cleanup: nft.Cleanup, open: openNFT, connect: connectNFT,
			probe: func(context.Context, *modeSetup) error { return nft.Probe() }},
		{name: "iptables", auto: true, guards: true, cleanup: iptables.Cleanup, open: openIPTables, connect: connectIPTables,
			probe: probeIPTables, present: iptables.Present,
			noMesh: "whose packet filter drops what the node sends to a ClusterIP that is not translated"},
		{name: "ipvs", fallback: []string{"iptables", "nft"}, cleanup: ipvs.Cleanup, open: openIPVS, probe: probeIPVS,
			present: ipvs.Present, noMesh: firstAtClusterIPs},
		{name: "userspace", cleanup: userspace.Cleanup, open: openUserspace,
			probe: func(context.Context, *modeSetup) error { return userspace.Probe() }},
	}
}

// modeAuto is the value of --mode that leaves the choice to fairlead.
const modeAuto = "auto"

// ModeValues are the values of --mode.
func ModeValues() []string {
	names := []string{modeAuto}
	for _, m := range proxyModes() {
		names = append(names, m.name)
	}
	return names
}

// candidateModes returns the modes to try for a value of --mode, none if it is
// not one.
func candidateModes(value string) []proxyMode {
	var out []proxyMode
	byName := map[string]proxyMode{}
	for _, m := range proxyModes() {
		byName[m.name] = m
		if m.auto && value == modeAuto {
			out = append(out, m)
		}
	}
	if m, ok := byName[value]; ok {
		out = append(out, m)
		for _, name := range m.fallback {
			out = append(out, byName[name])
		}
	}
	return out
}

// candidates returns the modes to try for the flags.
func (f *ProxyFlags) candidates() []proxyMode {
	all := candidateModes(f.mode)
	if !f.connect.on() {
		return all
	}
	var out []proxyMode
	for _, m := range connectable(all) {
		out = append(out, withConnectTime(m))
	}
	return out
}

// modeSetup is what a mode is set up with.
type modeSetup struct {
	flags    *ProxyFlags // checked
	networks base.NetworkFlags
	balance  dataplane.Balance
	log      *slog.Logger
	// dropInvalid allows to drop packets that connection tracking finds invalid.
	dropInvalid bool
	// logLost has packets that reach no endpoint logged for Flows, if the mode can.
	logLost bool

	// What the probes of iptables and ipvs have found.
	variant     iptables.Variant
	ipvsVariant kiptables.Variant
	schedulers  []string
}

// probeTimeout bounds the probe of one mode.
const probeTimeout = 30 * time.Second

// choose returns the first of the candidates that works on this machine, and
// why those before it do not.
func (s *modeSetup) choose(ctx context.Context, candidates []proxyMode) (m proxyMode, skipped, err error) {
	var failed []error
	for _, m := range candidates {
		limited, cancel := context.WithTimeout(ctx, probeTimeout)
		err := m.probe(limited, s)
		cancel()
		if err == nil {
			return m, errors.Join(failed...), nil
		}
		failed = append(failed, err)
	}
	return proxyMode{}, nil, errors.Join(failed...)
}

// chooseMode chooses the mode for the flags and logs why it is not the one
// wanted. For --mode other than auto that is the reason returned.
func (f *ProxyFlags) chooseMode(ctx context.Context, s *modeSetup) (m proxyMode, fallbackReason string, err error) {
	candidates := f.candidates()
	if f.ipvs.strict && f.mode != modeAuto {
		candidates = candidates[:1]
	}
	m, skipped, err := s.choose(ctx, candidates)
	switch {
	case err != nil && f.ipvs.strict && f.mode == "ipvs":
		return m, "", fmt.Errorf("%w; without --mode-strict the proxy would fall back to another mode", err)
	case err != nil || skipped == nil:
		return m, "", err
	}
	wanted := candidates[0].name
	s.log.Warn("proxy mode "+m.name+" is used, since "+wanted+" does not work here", "err", skipped)
	if f.mode != modeAuto {
		fallbackReason = fmt.Sprintf("proxy mode %s is used in place of %s: %s", m.name, wanted, base.OneLine(skipped))
	}
	return m, fallbackReason, nil
}

// connectTime returns the mode, with connect-time in front if that is wanted and works, and what the status shows: "on", or why it is off
// where that was left to choose.
func (f *ProxyFlags) connectTime(m proxyMode, s *modeSetup) (proxyMode, string) {
	m, why := f.connect.inFront(m, s.balance)
	switch {
	case f.connect.in:
		return m, connectOn
	case why == nil:
		return m, ""
	}
	s.log.Info("connect-time is off", "reason", why)
	return m, connectOff + ": " + base.OneLine(why)
}

// CleanUpModes removes what the modes other than keep wrote to the kernel; with
// keep empty, what every mode wrote.
func CleanUpModes(ctx context.Context, keep string) error {
	errs := []error{closeLoopback(keep)}
	if keep == "" {
		errs = append(errs, Removing("programs of connect-time", kconnect.Cleanup("")),
			Removing("rules of connect-time", connecttime.Cleanup()),
			Removing("way of preStop requests", link.CloseInward()))
	}
	for _, m := range proxyModes() {
		if m.name != keep {
			errs = append(errs, Removing("proxy rules of mode "+m.name, m.cleanup(ctx)))
		}
	}
	return errors.Join(errs...)
}

// closeLoopback keeps 127.0.0.0/8 from being routed if the mode keep does not guard it.
func closeLoopback(keep string) error {
	if slices.ContainsFunc(proxyModes(), func(m proxyMode) bool { return m.name == keep && m.guards }) {
		return nil
	}
	return dataplane.CloseLoopback()
}

func openNFT(s *modeSetup, o *proxy.Options) (err error) {
	o.Forwards = direct.Probe
	o.Dataplane, err = nft.New(nftConfig(s))
	return err
}

func probeIPTables(ctx context.Context, s *modeSetup) error {
	want, err := iptables.ParseVariant(s.flags.variant)
	if err != nil {
		return err
	}
	variant, why, err := iptables.ProbeVariant(ctx, want)
	if err != nil {
		return err
	}
	s.log.Info("iptables variant chosen", "variant", variant, "reason", why)
	s.variant = variant
	return nil
}

func openIPTables(s *modeSetup, o *proxy.Options) (err error) {
	o.Dataplane, err = iptables.New(iptablesConfig(s))
	return err
}

func iptablesConfig(s *modeSetup) iptables.Config {
	return iptables.Config{
		Variant: s.variant, Balance: s.balance, DropInvalid: s.dropInvalid, Log: s.log, MasqueradeBit: s.flags.MasqueradeBit,
	}
}

// Variants are the values of --iptables-variant.
func Variants() []string { return []string{"auto", "nft", "legacy"} }

// Balances are the values of --balance.
func Balances() []string { return []string{"random", "roundrobin"} }

// Removing adds to an error what could not be removed; nil stays nil.
func Removing(what string, err error) error {
	if err != nil {
		return fmt.Errorf("remove the %s: %w", what, err)
	}
	return nil
}

// Probes returns the modes that a proxy with these flags tries, for a look at the machine.
func (f *ProxyFlags) Probes(networks base.NetworkFlags) (out []preflight.Mode) {
	setup := &modeSetup{flags: f, networks: networks, log: slog.New(slog.DiscardHandler)}
	name := ""
	if f.connect.on() {
		name = " with connect-time"
	}
	for _, mode := range f.candidates() {
		out = append(out, preflight.Mode{Name: mode.name + name, Probe: func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, probeTimeout)
			defer cancel()
			return mode.probe(ctx, setup)
		}})
	}
	return out
}

// Features returns what these flags leave away where the machine cannot have it, for a look at the machine.
func (f *ProxyFlags) Features() []preflight.Feature { return f.connect.features() }
