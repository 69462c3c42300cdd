package parts

import (
	"context"
	"strings"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/connecttime"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	kconnect "github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/proxy"
)

// The values of --connect-time.
const (
	connectOn  = "on"
	connectOff = "off"
)

// ConnectTimes are the values of --connect-time.
func ConnectTimes() []string { return []string{connectOff, connectOn} }

// connectFlags set up connect-time in front of mode nft.
type connectFlags struct{ value, cgroup string }

func (f *connectFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.value, "connect-time", connectOff,
		"mode nft: on translates TCP connections of this node's programs and Pods when they are made, by BPF, and leaves the rest to nft")
	flags.StringVar(&f.cgroup, "connect-time-cgroup", "",
		"the control group whose programs --connect-time is for (default: the top of the machine's hierarchy of version 2)")
}

func (f *connectFlags) on() bool { return f.value == connectOn }

// check rejects flags that are wrong on any machine.
func (f *connectFlags) check(mode string, b dataplane.Balance) error {
	switch {
	case f.value == modeAuto:
		return base.Usagef("--connect-time auto is not available yet; want on or off")
	case f.value != connectOn && f.value != connectOff:
		return base.Usagef("--connect-time is %q; want %s", f.value, base.Wanted(f.value, ConnectTimes()))
	case !f.on() && f.cgroup != "":
		return base.Usagef("--connect-time-cgroup has no effect without --connect-time on")
	case !f.on():
		return nil
	case mode != modeAuto && mode != "nft":
		return base.Usagef("--connect-time on works in front of mode nft; with --mode %s leave it off", mode)
	case b != dataplane.Random:
		return base.Usagef("--connect-time on chooses endpoints at random; with --balance roundrobin leave it off")
	case f.cgroup != "" && !strings.HasPrefix(f.cgroup, "/"):
		return base.Usagef("--connect-time-cgroup is %q; want an absolute path", f.cgroup)
	}
	return nil
}

func (f *connectFlags) config() kconnect.Config { return kconnect.Config{Cgroup: f.cgroup} }

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
	if f.on() {
		return nil
	}
	return Removing("programs of connect-time", kconnect.Cleanup(""))
}
