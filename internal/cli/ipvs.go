package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/ipvs"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	kiptables "github.com/fairlead/fairlead/internal/kernel/iptables"
	kipvs "github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/proxy"
)

// ipvsFlags set up the mode of that name. They have kube-proxy's names and
// defaults.
type ipvsFlags struct {
	scheduler             string
	exclude               prefixesValue
	strictARP, strictMode bool
	timeouts              kipvs.Timeouts
	sync, minSync         time.Duration
}

func (f *ipvsFlags) add(flags *pflag.FlagSet) {
	flags.BoolVar(&f.strictMode, "mode-strict", false, "with --mode ipvs: do not start where IPVS does not work, instead of taking mode iptables (or nft)")
	flags.StringVar(&f.scheduler, "ipvs-scheduler", ipvs.DefaultScheduler, "mode ipvs: how an endpoint is chosen: "+strings.Join(ipvs.Schedulers, ", "))
	flags.Var(&f.exclude, "ipvs-exclude-cidrs", "mode ipvs: ranges of addresses whose virtual servers are somebody else's")
	flags.BoolVar(&f.strictARP, "ipvs-strict-arp", false, "mode ipvs: answer ARP only for addresses of the interface asked (arp_ignore 1, arp_announce 2)")
	flags.DurationVar(&f.timeouts.TCP, "ipvs-tcp-timeout", 0, "mode ipvs: how long an idle TCP connection is remembered (0: as the kernel has it)")
	flags.DurationVar(&f.timeouts.TCPFin, "ipvs-tcpfin-timeout", 0, "mode ipvs: how long a TCP connection is remembered after a FIN (0: as the kernel has it)")
	flags.DurationVar(&f.timeouts.UDP, "ipvs-udp-timeout", 0, "mode ipvs: how long a silent UDP client keeps its endpoint (0: as the kernel has it)")
	flags.DurationVar(&f.sync, "ipvs-sync-period", 30*time.Second, "mode ipvs: how often everything is compared with the kernel and repaired, in place of --sync-period")
	flags.DurationVar(&f.minSync, "ipvs-min-sync-period", 0, "mode ipvs: the least time between two changes of the kernel (0: as little as other modes)")
}

// check refuses flags that are wrong on any machine.
func (f *ipvsFlags) check(serviceCIDRs []netip.Prefix) error {
	if !slices.Contains(ipvs.Schedulers, f.scheduler) {
		return usagef("--ipvs-scheduler is %q; want one of %s", f.scheduler, strings.Join(ipvs.Schedulers, ", "))
	}
	if f.sync <= 0 || f.minSync < 0 || f.minSync > f.sync {
		return usagef("--ipvs-sync-period is %s and --ipvs-min-sync-period %s; want more than 0, and the second not above the first", f.sync, f.minSync)
	}
	if err := f.config(serviceCIDRs).Check(); err != nil {
		return usageError{err}
	}
	return nil
}

func (f *ipvsFlags) config(serviceCIDRs []netip.Prefix) ipvs.Config {
	return ipvs.Config{
		Scheduler: f.scheduler, ServiceCIDRs: serviceCIDRs, ExcludeCIDRs: f.exclude,
		StrictARP: f.strictARP, Timeouts: f.timeouts,
	}
}

// options completes o for mode ipvs. Where that does not work it leaves o.Dataplane
// nil and returns the mode to take instead.
func (f *ipvsFlags) options(log *slog.Logger, variant string, o *proxy.Options) (mode string, err error) {
	p, has, err := f.plane(log, variant, o.ServiceCIDRs)
	if err != nil {
		mode, o.FallbackReason, err = f.fallback(log, err)
		return mode, err
	}
	o.Dataplane, o.Schedulers, o.Addresses = p, has, p.NodeAddresses
	o.Mode, o.AuditPeriod, o.MinInterval = "ipvs", f.sync, f.minSync
	o.Conntrack = conntrack.DeleteBalanced
	o.MaxInterval = max(o.MinInterval, proxy.DefaultMaxInterval)
	return o.Mode, nil
}

// plane makes the plane of the mode and says which schedulers Services may
// name.
func (f *ipvsFlags) plane(log *slog.Logger, variant string, serviceCIDRs []netip.Prefix) (*ipvs.Mode, []string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), probeWithin)
	defer cancel()
	v, err := iptables.ParseVariant(variant)
	if err != nil {
		return nil, nil, err
	}
	cfg := f.config(serviceCIDRs)
	var why string
	if cfg.Variant, why, err = iptables.Choose(ctx, v); err != nil {
		return nil, nil, err
	}
	if err := ipvs.Probe(ctx, cfg); err != nil {
		return nil, nil, err
	}
	has, err := ipvs.Available(ipvs.Schedulers...)
	if err != nil {
		return nil, nil, err
	}
	log.Info("IPVS is there", "schedulers", strings.Join(has, " "), "iptables", cfg.Variant, "because", why)
	p, err := ipvs.New(cfg)
	return p, has, err
}

// warnOfLoopback says that mode ipvs has no node ports on 127.0.0.0/8, if
// --nodeport-addresses asks for them.
func warnOfLoopback(log *slog.Logger, ranges []string) {
	for _, text := range ranges {
		r, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err == nil && r.Overlaps(netip.MustParsePrefix("127.0.0.0/8")) {
			log.Warn("node ports do not answer on 127.0.0.0/8: IPVS cannot do that; modes nft and iptables can", "nodeport-addresses", text)
		}
	}
}

// inPlaceOfIPVS is the mode to take where IPVS does not work.
func inPlaceOfIPVS() string {
	if _, err := kiptables.Default(context.Background()); errors.Is(err, exec.ErrNotFound) {
		return "nft"
	}
	return "iptables"
}

// fallback says why another mode than ipvs is taken, or returns the error
// itself where that is not wanted.
func (f *ipvsFlags) fallback(log *slog.Logger, err error) (mode, why string, _ error) {
	if f.strictMode {
		return "", "", fmt.Errorf("%w; without --mode-strict the proxy would take mode %s", err, inPlaceOfIPVS())
	}
	mode = inPlaceOfIPVS()
	log.Warn("proxy mode "+mode+" is taken, since ipvs does not work here", "err", err)
	return mode, fmt.Sprintf("proxy mode %s is taken in place of ipvs: %v", mode, err), nil
}
