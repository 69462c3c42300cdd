package parts

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/connecttime"
	"github.com/fairlead/fairlead/internal/dataplane/direct"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	kconnect "github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/proxy"
)

// The values of --connect-time, beside modeAuto.
const (
	connectOn  = "on"
	connectOff = "off"
)

// ConnectTimes are the values of --connect-time.
func ConnectTimes() []string { return []string{modeAuto, connectOff, connectOn} }

// connectFlags set up connect-time in front of mode nft.
type connectFlags struct {
	value, cgroup string
	// in is set when it is in front of the mode that was chosen.
	in bool
}

func (f *connectFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.value, "connect-time", connectOff,
		"mode nft: on translates connections and datagrams of this node's programs and Pods when they are made, by BPF, and leaves "+
			"the rest to nft; auto does where that works")
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
	case mode != modeAuto && mode != "nft":
		return base.Usagef("--connect-time on works in front of mode nft; with --mode %s leave it off", mode)
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
	case m.name != "nft":
		return m, fmt.Errorf("it works in front of mode nft, and this is mode %s", m.name)
	case b != dataplane.Random:
		return m, errors.New("it chooses endpoints at random, and --balance is roundrobin")
	default:
		if why = kconnect.Probe(f.config()); why != nil {
			return m, why
		}
		m = withConnectTime(m)
	}
	f.in = true
	return m, nil
}

// withConnectTime is mode nft with connect-time in front: it works where both do.
func withConnectTime(m proxyMode) proxyMode {
	behind := m.probe
	m.probe = func(ctx context.Context, s *modeSetup) error {
		if err := behind(ctx, s); err != nil {
			return err
		}
		return kconnect.Probe(s.flags.connect.config())
	}
	m.open = func(s *modeSetup, o *proxy.Options) (err error) {
		o.Forwards = direct.Probe
		o.Dataplane, err = connecttime.New(nftConfig(s), s.flags.connect.config(), s.log)
		return err
	}
	return m
}

func nftConfig(s *modeSetup) nft.Config {
	return nft.Config{Balance: s.balance, DropInvalid: s.dropInvalid, MasqueradeBit: s.flags.MasqueradeBit, LogLost: s.logLost}
}

// detach takes the programs of an earlier process away where connect-time is off now: nobody would bring their
// maps up to date. What they translated new connections for is in nft's rules.
func (f *connectFlags) detach() error {
	if f.in {
		return nil
	}
	return errors.Join(Removing("programs of connect-time", kconnect.Cleanup("")), Removing("rules of connect-time", connecttime.Cleanup()))
}
