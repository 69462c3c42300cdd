package parts

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/connecttime"
	"github.com/fairlead/fairlead/internal/dataplane/direct"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/explain"
	kconnect "github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/preflight"
	"github.com/fairlead/fairlead/internal/proxy"
)

// The values of --connect-time, beside modeAuto.
const (
	connectOn  = "on"
	connectOff = "off"
)

// ConnectTimes are the values of --connect-time.
func ConnectTimes() []string { return []string{modeAuto, connectOff, connectOn} }

// connectFlags set up connect-time in front of a mode.
type connectFlags struct {
	value, cgroup string
	// in is set when it is in front of the mode that was chosen.
	in bool
}

func (f *connectFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.value, "connect-time", connectOff,
		"modes nft and iptables: on translates connections and datagrams of this node's programs and Pods when they are made, by BPF, "+
			"and leaves the rest to the rules of the mode; auto does where that works")
	flags.StringVar(&f.cgroup, "connect-time-cgroup", "",
		"the control group whose programs --connect-time is for (default: the top of the machine's hierarchy of version 2)")
}

func (f *connectFlags) on() bool { return f.value == connectOn }

// check rejects flags that are wrong on any machine.
func (f *connectFlags) check(mode string, b dataplane.Balance) error {
	switch {
	case !slices.Contains(ConnectTimes(), f.value):
		return base.Usagef("--connect-time is %q; want %s", f.value, base.Wanted(f.value, ConnectTimes()))
	case f.value == connectOff && f.cgroup != "":
		return base.Usagef("--connect-time-cgroup has no effect with --connect-time off")
	case f.cgroup != "" && !strings.HasPrefix(f.cgroup, "/"):
		return base.Usagef("--connect-time-cgroup is %q; want an absolute path", f.cgroup)
	case !f.on():
		return nil
	case len(connectable(candidateModes(mode)[:1])) == 0:
		return base.Usagef("--connect-time on works in front of modes %s; with --mode %s leave it off", connectableNames(), mode)
	case b != dataplane.Random:
		return base.Usagef("--connect-time on chooses endpoints at random; with --balance roundrobin leave it off")
	}
	return nil
}

func (f *connectFlags) config() kconnect.Config { return kconnect.Config{Cgroup: f.cgroup} }

// inFront returns the mode that was chosen, with connect-time in front if it is asked for and works; otherwise why is the reason
// where that was left to choose.
func (f *connectFlags) inFront(m proxyMode, b dataplane.Balance) (out proxyMode, why error) {
	switch {
	case f.on(): // candidates has it in front
	case f.value != modeAuto:
		return m, nil
	case m.connect == nil:
		return m, fmt.Errorf("it works in front of modes %s, and this is mode %s", connectableNames(), m.name)
	case b != dataplane.Random:
		return m, errors.New("it chooses endpoints at random, and --balance is roundrobin")
	default:
		if why = connecttime.Probe(f.config()); why != nil {
			return m, why
		}
		m = withConnectTime(m)
	}
	f.in = true
	return m, nil
}

// connectable returns the modes that connect-time works in front of.
func connectable(modes []proxyMode) (out []proxyMode) {
	for _, m := range modes {
		if m.connect != nil {
			out = append(out, m)
		}
	}
	return out
}

func connectableNames() string {
	var names []string
	for _, m := range connectable(proxyModes()) {
		names = append(names, m.name)
	}
	return strings.Join(names, " and ")
}

// withConnectTime is a mode with connect-time in front: it works where both do.
func withConnectTime(m proxyMode) proxyMode {
	behind := m.probe
	m.probe = func(ctx context.Context, s *modeSetup) error {
		if err := behind(ctx, s); err != nil {
			return err
		}
		return connecttime.Probe(s.flags.connect.config())
	}
	m.open = m.connect
	return m
}

func connectNFT(s *modeSetup, o *proxy.Options) (err error) {
	o.Forwards = direct.Probe
	o.Dataplane, err = connecttime.New(nftConfig(s), s.flags.connect.config(), s.log)
	return err
}

func connectIPTables(s *modeSetup, o *proxy.Options) (err error) {
	o.Dataplane, err = connecttime.NewIPTables(iptablesConfig(s), s.flags.connect.config(), s.log)
	return err
}

func nftConfig(s *modeSetup) nft.Config {
	return nft.Config{Balance: s.balance, DropInvalid: s.dropInvalid, MasqueradeBit: s.flags.MasqueradeBit, LogLost: s.logLost}
}

// detach takes the programs of an earlier process away where connect-time is off now: nobody would bring their
// maps up to date. What they translated new connections for is in the rules of the mode.
func (f *connectFlags) detach() error {
	if f.in {
		return nil
	}
	return errors.Join(Removing("programs of connect-time", kconnect.Cleanup("")), Removing("rules of connect-time", connecttime.Cleanup()))
}

// features are what connect-time does without where the machine cannot have it.
func (f *connectFlags) features() (out []preflight.Feature) {
	works := f.on() // else the proxy does not start
	if f.value == modeAuto {
		why := connecttime.Probe(f.config())
		works = why == nil
		out = append(out, preflight.Feature{
			Name: "connect-time", Probe: func() error { return why },
			Without: "the rules of the mode translate the connections of local clients, too",
			Remedy:  "mend what the message names, or give --connect-time off",
		})
	}
	if works && f.cgroup != "" { // below the top are all
		out = append(out, preflight.Feature{
			Name: "connect-time of Pods", Probe: f.covers, Without: "the rules of the mode translate connections of some Pods",
			Remedy: kconnect.CoverRemedy(f.config()),
		})
	}
	return out
}

// covers returns which processes of Pods are outside of the control group.
func (f *connectFlags) covers() error {
	found, err := kconnect.FindOutside(f.config())
	if len(found) > 0 {
		return errors.New(kconnect.Uncovered(f.config(), found))
	}
	return err
}

// uncovered is covers for an answer about a Service, nil if all is in the group or cannot be found out.
func uncovered(cgroup string) *explain.Uncovered {
	cfg := kconnect.Config{Cgroup: cgroup}
	found, _ := kconnect.FindOutside(cfg) // what cannot be seen is no news of the Service; 'fairlead check' reports it
	if len(found) == 0 {
		return nil
	}
	out := &explain.Uncovered{Text: kconnect.Uncovered(cfg, found), Remedy: kconnect.CoverRemedy(cfg)}
	for _, one := range found {
		out.Addresses = append(out.Addresses, one.Addrs...)
	}
	slices.SortFunc(out.Addresses, netip.Addr.Compare)
	out.Addresses = slices.Compact(out.Addresses)
	return out
}
