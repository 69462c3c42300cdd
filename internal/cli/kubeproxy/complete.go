package kubeproxy

import (
	"cmp"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/config"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/kubeproxyconfig"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/table"
)

// configFile is a KubeProxyConfiguration that was read.
type configFile = config.KubeProxyFile

// Complete checks the flags, and sets the ones of fairlead that they stand for. A flag of fairlead that was given comes
// first.
func (k *Flags) Complete(cmd *cobra.Command, g *base.Global, p *parts.ProxyFlags) error {
	k.file = config.KubeProxy(cmd)
	steps := []func() error{k.check, k.completeMode, k.completeAddresses, func() error { return k.completeLocal(p) }}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	if name := strings.ToLower(strings.TrimSpace(k.hostname)); name != "" || k.changed("hostname-override") {
		if err := k.set("node-name", name); err != nil {
			return err
		}
	}
	if k.masqueradeBit != defaultMasqueradeBit {
		p.MasqueradeBit = int(k.masqueradeBit)
	}
	k.completeLogs(g)
	return nil
}

func (k *Flags) changed(flag string) bool { return k.flags.Changed(flag) }

// set sets a flag of fairlead that was not given.
func (k *Flags) set(flag, value string) error {
	if k.changed(flag) {
		return nil
	}
	if err := k.flags.Set(flag, value); err != nil {
		return base.Usagef("--%s %q: %w", flag, value, err)
	}
	return nil
}

// check rejects what is wrong on any machine.
func (k *Flags) check() error {
	between := func(flag string, v, least, most int32) error {
		if v < least || v > most {
			return base.Usagef("--%s is %d; want %d to %d", flag, v, least, most)
		}
		return nil
	}
	if err := cmp.Or(
		between("healthz-port", k.healthzPort, 0, 65535), between("metrics-port", k.metricsPort, 0, 65535),
		between("oom-score-adj", k.oomScoreAdj, -1000, 1000), between("iptables-masquerade-bit", k.masqueradeBit, 0, 31),
		between("kube-api-burst", k.burst, 0, 1<<31-1), between("v", k.verbosity, 0, 1<<31-1),
	); err != nil {
		return err
	}
	if err := kubeproxyconfig.HiddenMetricsVersion(k.hiddenMetrics); err != nil {
		return base.Usagef("--show-hidden-metrics-for-version is %q; %w", k.hiddenMetrics, err)
	}
	if len(k.bindAddress) > 1 {
		return base.Usagef("--bind-address has %d addresses; want one", len(k.bindAddress))
	}
	if k.syncPeriod <= 0 || k.minSyncPeriod < 0 || k.minSyncPeriod > k.syncPeriod {
		return base.Usagef("--iptables-sync-period is %s and --iptables-min-sync-period %s; want more than 0, and the second not above the first",
			k.syncPeriod, k.minSyncPeriod)
	}
	if !slices.Contains(base.LogFormats(), k.logFormat) {
		return base.Usagef("--logging-format is %q; want %s", k.logFormat, base.Wanted(k.logFormat, base.LogFormats()))
	}
	if v := k.version; !slices.Contains([]string{"true", "false", "raw"}, v) {
		return base.Usagef("--version is %q; want true, false or raw", v)
	}
	return k.checkAcknowledged()
}

// checkAcknowledged rejects values that kube-proxy rejects, too.
func (k *Flags) checkAcknowledged() error {
	for _, pairs := range []struct {
		flag, value, want string
		parse             func(string) error
	}{
		{"feature-gates", k.featureGates, "NAME=true or NAME=false", func(s string) error { _, err := strconv.ParseBool(s); return err }},
		{"vmodule", k.vmodule, "PATTERN=N", func(s string) error { _, err := strconv.ParseUint(s, 10, 31); return err }},
	} {
		for pair := range strings.SplitSeq(pairs.value, ",") {
			if strings.TrimSpace(pair) == "" {
				continue
			}
			name, value, ok := strings.Cut(pair, "=")
			if !ok || strings.TrimSpace(name) == "" || pairs.parse(strings.TrimSpace(value)) != nil {
				return base.Usagef("--%s has %q; want %s", pairs.flag, pair, pairs.want)
			}
		}
	}
	for flag, size := range map[string]string{"log-text-info-buffer-size": k.textBuffer, "log-json-info-buffer-size": k.jsonBuffer} {
		if _, err := resource.ParseQuantity(size); err != nil {
			return base.Usagef("--%s is %q; want a size such as 64Ki", flag, size)
		}
	}
	if k.configSync <= 0 {
		return base.Usagef("--config-sync-period is %s; want more than 0", k.configSync)
	}
	return nil
}

// likeKubeProxy reports whether the defaults of kube-proxy count, which depend on its mode.
func (k *Flags) likeKubeProxy() bool { return k.file != nil || k.changed("proxy-mode") }

func (k *Flags) completeMode() error {
	name, ok := modeNames[k.mode]
	if k.mode == "" {
		return nil
	}
	if !ok {
		names := slices.Sorted(maps.Keys(modeNames))
		return base.Usagef("--proxy-mode is %q; want %s", k.mode, base.Wanted(k.mode, names))
	}
	return k.set("mode", name)
}

// completeAddresses sets where node ports and health checks answer.
func (k *Flags) completeAddresses() error {
	healthz, metrics := "0.0.0.0", "127.0.0.1"
	if len(k.bindAddress) == 1 && k.bindAddress[0].Is6() {
		healthz, metrics = "::", "::1"
	}
	for _, a := range []struct {
		flag, host string
		port       int32
	}{{"healthz-bind-address", healthz, k.healthzPort}, {"metrics-bind-address", metrics, k.metricsPort}} {
		value := ""
		if a.port != 0 {
			given, _ := k.flags.GetString(a.flag)
			value = parts.WithPort(given, strconv.Itoa(int(a.port)))
			if !k.changed(a.flag) {
				value = net.JoinHostPort(a.host, strconv.Itoa(int(a.port)))
			}
		}
		if err := k.flags.Set(a.flag, value); err != nil {
			return base.AsUsage(err)
		}
	}
	if !k.likeKubeProxy() {
		return nil
	}
	switch {
	case k.mode == kubeproxyconfig.ModeNFTables:
		return k.set("nodeport-addresses", "primary")
	case k.mode != kubeproxyconfig.ModeIPVS && k.localhostNodePorts:
		k.everywhere = !k.changed("nodeport-addresses")
		return k.set("nodeport-addresses", "all")
	}
	return nil
}

// completeLocal sets how this node's Pods are told from other clients.
func (k *Flags) completeLocal(p *parts.ProxyFlags) error {
	if k.likeKubeProxy() {
		if err := k.set("detect-local-mode", "ClusterCIDR"); err != nil {
			return err
		}
	}
	var name, flag string
	switch p.DetectLocal {
	case "BridgeInterface":
		name, flag = k.bridge, "pod-bridge-interface"
	case "InterfaceNamePrefix":
		name, flag = k.prefix, "pod-interface-name-prefix"
	default:
		return nil
	}
	i, err := table.ParseInterface(name, flag == "pod-interface-name-prefix")
	if err != nil {
		return base.Usagef("--detect-local-mode %s needs --%s: %w", p.DetectLocal, flag, err)
	}
	p.PodInterfaces = []table.Interface{i}
	return nil
}

// debugVerbosity is the verbosity from which on kube-proxy's log is for debugging (Kubernetes' logging conventions).
const debugVerbosity = 4

func (k *Flags) completeLogs(g *base.Global) {
	if k.changed("logging-format") && !k.changed("log-format") {
		g.LogFormat = k.logFormat
	}
	if k.changed("v") && !k.changed("log-level") {
		g.LogLevel = levelOf(k.verbosity)
	}
}

func levelOf(verbosity int32) string {
	if verbosity >= debugVerbosity {
		return "debug"
	}
	return "info"
}

// Config sets how the API server is asked.
func (k *Flags) Config(cfg *rest.Config) {
	cfg.QPS, cfg.Burst = k.qps, int(k.burst)
	cfg.ContentType, cfg.AcceptContentTypes = k.contentType, k.accept
	if cfg.AcceptContentTypes == "" && cfg.ContentType != "" {
		cfg.AcceptContentTypes = cfg.ContentType + ",application/json"
	}
}

// Options completes the options of the proxy.
func (k *Flags) Options(o *proxy.Options) {
	o.ListenOrFail = k.hardFail
	if len(k.bindAddress) == 1 && !k.bindAddress[0].IsUnspecified() {
		o.PrimaryAddress = k.bindAddress[0]
	}
	if o.Mode == "ipvs" {
		return // it has its own periods
	}
	if k.changed("iptables-sync-period") && !k.changed("sync-period") {
		o.AuditPeriod = k.syncPeriod
	}
	if k.minSyncPeriod > 0 {
		o.MinInterval, o.MaxInterval = k.minSyncPeriod, max(k.minSyncPeriod, proxy.DefaultMaxInterval)
	}
}

// Start logs once what has no effect, and sets the process up.
func (k *Flags) Start(log *slog.Logger) {
	if k.file != nil {
		k.file.Log(log)
	}
	for _, name := range slices.Sorted(maps.Keys(acknowledged)) {
		if k.changed(name) {
			log.Info("a flag of kube-proxy has no effect", "flag", name, "reason", acknowledged[name])
		}
	}
	if k.masqueradeBit == 0 {
		log.Info("--iptables-masquerade-bit 0 stands for bit 14")
	}
	if k.likeKubeProxy() && k.mode == "" && !k.changed("mode") {
		log.Warn("no mode is named: the proxy chooses one, where kube-proxy v1.37 would use iptables; name one with mode or --proxy-mode")
	}
	if list, ok := k.flags.Lookup("nodeport-addresses").Value.(pflag.SliceValue); ok && k.everywhere && !dataplane.LoopbackOpens() {
		_ = list.Replace(nil)
		log.Warn("node ports do not answer on 127.0.0.1: net.ipv4.conf.all.route_localnet cannot be set here")
	}
	if err := process.SetOOMScoreAdj(os.Getpid(), int(k.oomScoreAdj)); err != nil {
		log.Debug("cannot set oom_score_adj; keeping the current value", "err", err)
	}
}
