package parts

import (
	"errors"
	"io/fs"
	"log/slog"
	"runtime"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
)

// conntrackFlags are kube-proxy's, with its names and defaults, and accounting, which it does not have.
type conntrackFlags struct {
	perCore, least              int32
	beLiberal, accounting       bool
	tcpEstablished, tcpClosing  time.Duration
	udpTimeout, udpStreamPeriod time.Duration
}

func (f *conntrackFlags) add(flags *pflag.FlagSet) {
	flags.Int32Var(&f.perCore, "conntrack-max-per-core", 32768,
		"most tracked connections for each processor; 0 keeps the machine's limit")
	flags.Int32Var(&f.least, "conntrack-min", 131072, "least limit of tracked connections, whatever --conntrack-max-per-core is")
	flags.BoolVar(&f.beLiberal, "conntrack-tcp-be-liberal", false,
		"let TCP packets outside of the window count as valid; what endpoints send outside of any connection is then not dropped")
	flags.BoolVar(&f.accounting, "conntrack-accounting", false,
		"have the kernel count packets and bytes of each connection, for 'fairlead top services'; off keeps what the machine has")
	flags.DurationVar(&f.tcpEstablished, "conntrack-tcp-timeout-established", 24*time.Hour,
		"when an idle TCP connection is forgotten; 0 keeps the current value")
	flags.DurationVar(&f.tcpClosing, "conntrack-tcp-timeout-close-wait", time.Hour,
		"when a TCP connection in CLOSE_WAIT is forgotten; 0 keeps the current value")
	flags.DurationVar(&f.udpTimeout, "conntrack-udp-timeout", 0, "when a UDP flow without an answer is forgotten; 0 keeps the current value")
	flags.DurationVar(&f.udpStreamPeriod, "conntrack-udp-timeout-stream", 0,
		"when a UDP flow with answers is forgotten; 0 keeps the current value")
}

// check rejects flags that are wrong on any machine.
func (f *conntrackFlags) check() error {
	for flag, v := range map[string]int64{
		"conntrack-max-per-core": int64(f.perCore), "conntrack-min": int64(f.least),
		"conntrack-tcp-timeout-established": int64(f.tcpEstablished), "conntrack-tcp-timeout-close-wait": int64(f.tcpClosing),
		"conntrack-udp-timeout": int64(f.udpTimeout), "conntrack-udp-timeout-stream": int64(f.udpStreamPeriod),
	} {
		if v < 0 {
			return base.Usagef("--%s is negative; want 0 or more", flag)
		}
	}
	return nil
}

// apply sets the parameters of connection tracking, as far as they can be set
// here: in another network namespace the machine's limit cannot, and need
// not be. It returns whether packets that connection tracking finds invalid may
// be dropped.
func (f *conntrackFlags) apply(log *slog.Logger) (dropInvalid bool) {
	limit := conntrack.Settings{Max: conntrack.Max(int(f.perCore), int(f.least), runtime.NumCPU())}
	switch err := limit.Set(); {
	case errors.Is(err, fs.ErrPermission):
		log.Debug("the limit of tracked connections cannot be set in this network namespace; keeping the current value", "err", err)
	case err != nil:
		log.Warn("cannot set the limit of tracked connections; keeping the current value", "err", err)
	}
	s := conntrack.Settings{
		TCPBeLiberal: f.beLiberal, Accounting: f.accounting,
		TCPEstablished: f.tcpEstablished, TCPCloseWait: f.tcpClosing,
		UDP: f.udpTimeout, UDPStream: f.udpStreamPeriod,
	}
	if err := s.Set(); err != nil {
		log.Warn("cannot set all parameters of connection tracking; keeping the current values", "err", err)
	}
	return !conntrack.BeLiberal()
}
