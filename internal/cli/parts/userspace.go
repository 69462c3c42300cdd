package parts

import (
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/userspace"
	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/svc"
)

// userspaceFlags set up the mode of that name.
type userspaceFlags struct {
	ports                      base.PortRange
	connect, udpTimeout, drain time.Duration
}

func (f *userspaceFlags) add(flags *pflag.FlagSet) {
	flags.Var(&f.ports, "proxy-port-range", "mode userspace: range of the ports it listens on (default: the kernel chooses)")
	flags.DurationVar(&f.connect, "userspace-connect-timeout", relay.DefaultConnectTimeout,
		"mode userspace: how long an endpoint may take to accept a connection before another one is tried")
	flags.DurationVar(&f.udpTimeout, "udp-timeout", relay.DefaultUDPTimeout, "mode userspace: how long a silent UDP client keeps its endpoint")
	flags.DurationVar(&f.drain, "userspace-drain-timeout", userspace.DefaultDrain,
		"mode userspace: how long open connections may go on when the proxy ends")
}

// maxDrain bounds --userspace-drain-timeout: an orderly stop of the proxy waits
// for it.
const maxDrain = 15 * time.Second

// check rejects flags that are wrong on any machine.
func (f *userspaceFlags) check() error {
	for _, d := range []struct {
		flag      string
		is, atMax time.Duration
	}{
		{"userspace-connect-timeout", f.connect, time.Minute},
		{"udp-timeout", f.udpTimeout, 24 * time.Hour},
		{"userspace-drain-timeout", f.drain, maxDrain},
	} {
		if d.is <= 0 || d.is > d.atMax {
			return base.Usagef("--%s is %s; want more than 0 and at most %s", d.flag, d.is, d.atMax)
		}
	}
	return nil
}

func openUserspace(s *modeSetup, o *proxy.Options) (err error) {
	f := &s.flags.userspace
	o.Relayed = true
	o.Dataplane, err = userspace.New(userspace.Config{
		// Unless --balance says otherwise it chooses endpoints in turn (behaviour 39).
		Random:         s.flags.balance != "" && s.balance == dataplane.Random,
		Ports:          svc.PortRange(f.ports),
		ConnectTimeout: f.connect, UDPTimeout: f.udpTimeout, Drain: f.drain, Log: s.log,
	})
	return err
}
