package parts

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/ipvs"
	kipvs "github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/svc"
)

// ipvsFlags set up the mode of that name. They have kube-proxy's names and
// defaults.
type ipvsFlags struct {
	scheduler         string
	exclude           base.Prefixes
	strictARP, strict bool
	timeouts          kipvs.Timeouts
	sync, minSync     time.Duration
}

func (f *ipvsFlags) add(flags *pflag.FlagSet) {
	flags.BoolVar(&f.strict, "mode-strict", false,
		"with --mode ipvs: do not start where IPVS does not work, in place of falling back to mode iptables or nft")
	flags.StringVar(&f.scheduler, "ipvs-scheduler", ipvs.DefaultScheduler,
		"mode ipvs: how an endpoint is chosen: "+strings.Join(ipvs.Schedulers, ", "))
	flags.Var(&f.exclude, "ipvs-exclude-cidrs", "mode ipvs: ranges of addresses whose virtual servers belong to other programs")
	flags.BoolVar(&f.strictARP, "ipvs-strict-arp", false,
		"mode ipvs: answer ARP only for addresses of the interface asked (arp_ignore 1, arp_announce 2)")
	flags.DurationVar(&f.timeouts.TCP, "ipvs-tcp-timeout", 0,
		"mode ipvs: how long an idle TCP connection is remembered (0: as the kernel has it)")
	flags.DurationVar(&f.timeouts.TCPFin, "ipvs-tcpfin-timeout", 0,
		"mode ipvs: how long a TCP connection is remembered after a FIN (0: as the kernel has it)")
	flags.DurationVar(&f.timeouts.UDP, "ipvs-udp-timeout", 0,
		"mode ipvs: how long a silent UDP client keeps its endpoint (0: as the kernel has it)")
	flags.DurationVar(&f.sync, "ipvs-sync-period", 30*time.Second,
		"mode ipvs: how often everything is compared with the kernel and repaired, in place of --sync-period")
	flags.DurationVar(&f.minSync, "ipvs-min-sync-period", 0,
		"mode ipvs: the least time between two changes of the kernel (0: as little as other modes)")
}

// check rejects flags that are wrong on any machine.
func (f *ipvsFlags) check(serviceCIDRs []netip.Prefix) error {
	if !slices.Contains(ipvs.Schedulers, f.scheduler) {
		return base.Usagef("--ipvs-scheduler is %q; want one of %s%s", f.scheduler, strings.Join(ipvs.Schedulers, ", "),
			base.DidYouMean(f.scheduler, "", ipvs.Schedulers))
	}
	if f.sync <= 0 || f.minSync < 0 || f.minSync > f.sync {
		return base.Usagef("--ipvs-sync-period is %s and --ipvs-min-sync-period %s; want more than 0, and the second not above the first", f.sync,
			f.minSync)
	}
	if err := f.config(serviceCIDRs).Check(); err != nil {
		return base.AsUsage(err)
	}
	return nil
}

func (f *ipvsFlags) config(serviceCIDRs []netip.Prefix) ipvs.Config {
	return ipvs.Config{
		Scheduler: f.scheduler, ServiceCIDRs: serviceCIDRs, ExcludeCIDRs: f.exclude,
		StrictARP: f.strictARP, Timeouts: f.timeouts,
	}
}

func probeIPVS(ctx context.Context, s *modeSetup) error {
	want, err := iptables.ParseVariant(s.flags.variant)
	if err != nil {
		return err
	}
	cfg := s.flags.ipvs.config(s.networks.ServiceCIDRs)
	variant, why, err := iptables.Choose(ctx, want)
	if err != nil {
		return err
	}
	cfg.Variant = variant
	if err := ipvs.Probe(ctx, cfg); err != nil {
		return err
	}
	schedulers, err := ipvs.Available(ipvs.Schedulers...)
	if err != nil {
		return err
	}
	s.log.Info("IPVS works", "schedulers", strings.Join(schedulers, " "), "variant", variant, "reason", why)
	s.ipvsVariant, s.schedulers = variant, schedulers
	return nil
}

func openIPVS(s *modeSetup, o *proxy.Options) error {
	f := &s.flags.ipvs
	cfg := f.config(s.networks.ServiceCIDRs)
	cfg.Variant, cfg.MasqueradeBit = s.ipvsVariant, s.flags.MasqueradeBit
	p, err := ipvs.New(cfg)
	if err != nil {
		return err
	}
	o.Dataplane, o.Schedulers, o.Addresses = p, s.schedulers, p.NodeAddresses
	o.Unweighted = func(scheduler string) string {
		if scheduler = cmp.Or(scheduler, f.scheduler); ipvs.FollowsWeights(scheduler) {
			return ""
		}
		return "scheduler " + scheduler + " of mode ipvs chooses evenly; wrr follows them (annotation " + svc.SchedulerAnnotation + ")"
	}
	o.AuditPeriod, o.MinInterval, o.MaxInterval = f.sync, f.minSync, max(f.minSync, proxy.DefaultMaxInterval)
	o.NoLoopback = true
	warnOfLoopback(s.log, s.flags.nodePortAddresses)
	return nil
}

// warnOfLoopback warns that mode ipvs has no node ports on 127.0.0.0/8, if
// --nodeport-addresses asks for them.
func warnOfLoopback(log *slog.Logger, ranges []string) {
	for _, text := range ranges {
		r, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err == nil && r.Overlaps(netip.MustParsePrefix("127.0.0.0/8")) {
			log.Warn("node ports do not answer on 127.0.0.0/8: IPVS cannot do that; modes nft and iptables can", "nodeport-addresses", text)
		}
	}
}
