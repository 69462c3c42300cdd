package cli

import (
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/userspace"
	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/svc"
)

// userspaceFlags set up the mode of that name.
type userspaceFlags struct {
	ports                     string
	connect, udpTimeout, last time.Duration
}

func (f *userspaceFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.ports, "proxy-port-range", "", "mode userspace: FIRST-LAST of the ports it listens on (default: the kernel chooses)")
	flags.DurationVar(&f.connect, "userspace-connect-timeout", relay.DefaultConnectTimeout, "mode userspace: how long an endpoint may take to accept a connection before another one is tried")
	flags.DurationVar(&f.udpTimeout, "udp-timeout", relay.DefaultUDPTimeout, "mode userspace: how long a silent UDP client keeps its endpoint")
	flags.DurationVar(&f.last, "userspace-drain-timeout", userspace.DefaultDrain, "mode userspace: how long open connections may go on when the proxy ends")
}

// maxDrain bounds --userspace-drain-timeout: whoever stops the proxy waits for
// that.
const maxDrain = 15 * time.Second

// check refuses flags that are wrong on any machine.
func (f *userspaceFlags) check() error {
	for _, d := range []struct {
		flag      string
		is, atMax time.Duration
	}{
		{"userspace-connect-timeout", f.connect, time.Minute},
		{"udp-timeout", f.udpTimeout, 24 * time.Hour},
		{"userspace-drain-timeout", f.last, maxDrain},
	} {
		if d.is <= 0 || d.is > d.atMax {
			return usagef("--%s is %s; want more than 0 and at most %s", d.flag, d.is, d.atMax)
		}
	}
	_, err := f.portRange()
	return err
}

// portRange is the range of ports to listen on, the zero value for any.
func (f *userspaceFlags) portRange() (svc.PortRange, error) {
	if f.ports == "" {
		return svc.PortRange{}, nil
	}
	r, err := svc.ParsePortRange(f.ports)
	if err != nil {
		return r, usageError{fmt.Errorf("--proxy-port-range: %w", err)}
	}
	return r, nil
}

// plane makes the plane of the mode, of checked flags.
func (f *userspaceFlags) plane(log *slog.Logger, random bool, serviceCIDRs []netip.Prefix) (dataplane.Applier, error) {
	ports, err := f.portRange()
	if err != nil {
		return nil, err
	}
	if err := userspace.Probe(); err != nil {
		return nil, err
	}
	return userspace.New(userspace.Config{
		Random: random, ServiceCIDRs: serviceCIDRs, Ports: ports,
		ConnectTimeout: f.connect, UDPTimeout: f.udpTimeout, Drain: f.last, Log: log,
	})
}
