// Package kubeproxy gives 'fairlead proxy' the command line and the habits of kube-proxy v1.37.2, so that it starts
// with kube-proxy's own arguments: every flag is accepted, and either has its effect or is mentioned once in the log with
// what it means here. The proxy itself knows nothing of it.
package kubeproxy

import (
	"net/netip"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/kubeproxyconfig"
)

// Flags are kube-proxy's flags that are not flags of parts.ProxyFlags, base.ClientFlags or base.NetworkFlags, which
// have its names as well.
type Flags struct {
	mode, hostname, writeConfig, hiddenMetrics string
	bindAddress                                base.Addrs
	hardFail, profiling, initOnly, cleanup     bool
	healthzPort, metricsPort                   int32

	accept, contentType string
	qps                 float32
	burst               int32

	syncPeriod, minSyncPeriod time.Duration
	localhostNodePorts        bool
	masqueradeBit             int32
	bridge, prefix            string
	oomScoreAdj               int32

	verbosity          int32
	logFormat, version string

	// What is only mentioned.
	featureGates, vmodule, textBuffer, jsonBuffer string
	configSync, flush                             time.Duration
	textSplit, jsonSplit                          bool

	flags *pflag.FlagSet
	file  *configFile
	// everywhere is set if node ports answer on 127.0.0.1 only because that is kube-proxy's default.
	everywhere bool
}

// kube-proxy's default ports of health checks and metrics.
const (
	healthzPort = 10256
	metricsPort = 10249
)

// defaultOOMScoreAdj is kube-proxy's (qos.KubeProxyOOMScoreAdj).
const defaultOOMScoreAdj = -999

// acknowledged are the flags without an effect, with what they mean here.
var acknowledged = map[string]string{
	"feature-gates":                   "the proxy has no feature gates",
	"config-sync-period":              "watches deliver every change, so nothing is read again periodically",
	"vmodule":                         "all of the program logs at one level, --log-level",
	"log-flush-frequency":             "each line is written at once",
	"log-text-split-stream":           "every line goes to stderr",
	"log-text-info-buffer-size":       "each line is written at once",
	"log-json-split-stream":           "every line goes to stderr",
	"log-json-info-buffer-size":       "each line is written at once",
	"show-hidden-metrics-for-version": "no metric is hidden",
}

// Add adds the flags to a command that has the flags of the proxy already.
func (k *Flags) Add(cmd *cobra.Command) {
	k.flags = cmd.Flags()
	k.flags.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(dashes(name))
	})
	k.addProxy(k.flags)
	k.addClient(k.flags)
	k.addLogs(k.flags)
	k.addAcknowledged(k.flags)
}

func (k *Flags) addProxy(flags *pflag.FlagSet) {
	flags.StringVar(&k.mode, "proxy-mode", "", "--mode with kube-proxy's names: iptables, ipvs or nftables; "+
		"--nodeport-addresses and --detect-local-mode then have kube-proxy's defaults of that mode")
	flags.StringVar(&k.hostname, "hostname-override", "", "--node-name with kube-proxy's name")
	k.bindAddress = base.Addrs{netip.IPv4Unspecified()}
	flags.Var(&k.bindAddress, "bind-address",
		"the Node's primary address, in place of what the Node says (for --nodeport-addresses primary and source ranges); nothing listens on it")
	flags.BoolVar(&k.hardFail, "bind-address-hard-fail", false,
		"end if --healthz-bind-address or --metrics-bind-address cannot be listened on, rather than try again")
	flags.Int32Var(&k.healthzPort, "healthz-port", healthzPort, "port of --healthz-bind-address if that has none; 0 for no health checks")
	flags.Int32Var(&k.metricsPort, "metrics-port", metricsPort, "port of --metrics-bind-address if that has none; 0 for no metrics")
	flags.BoolVar(&k.profiling, "profiling", false, "serve /debug/pprof and /debug/flags/v on --metrics-bind-address")
	flags.StringVar(&k.hiddenMetrics, "show-hidden-metrics-for-version", "", "no metric is hidden; only 1.36 is accepted")
	flags.BoolVar(&k.initOnly, "init-only", false,
		"set the kernel parameters that need more than the capability NET_ADMIN, and end; the proxy can then run with NET_ADMIN only")
	flags.BoolVar(&k.cleanup, "cleanup", false, "remove the rules that 'fairlead proxy' left on this machine, and end")
	flags.StringVar(&k.writeConfig, "write-config-to", "", "write these flags to a file as KubeProxyConfiguration, and end")
	flags.DurationVar(&k.syncPeriod, "iptables-sync-period", 30*time.Second, "--sync-period with kube-proxy's name, but for mode ipvs")
	flags.DurationVar(&k.minSyncPeriod, "iptables-min-sync-period", 0,
		"the least time between two changes of the kernel, but for mode ipvs (0: as little as the proxy chooses)")
	flags.BoolVar(&k.localhostNodePorts, "iptables-localhost-nodeports", true,
		"with --proxy-mode iptables and without --nodeport-addresses: node ports answer on 127.0.0.1, too")
	flags.Int32Var(&k.masqueradeBit, "iptables-masquerade-bit", defaultMasqueradeBit,
		"bit of the packet mark for connections to masquerade, 0 to 31 (0 stands for 14)")
	flags.StringVar(&k.bridge, "pod-bridge-interface", "", "with --detect-local-mode BridgeInterface: the bridge of this node's Pods")
	flags.StringVar(&k.prefix, "pod-interface-name-prefix", "",
		"with --detect-local-mode InterfaceNamePrefix: how the names of the interfaces of this node's Pods begin")
	flags.Int32Var(&k.oomScoreAdj, "oom-score-adj", defaultOOMScoreAdj, "oom_score_adj of the process, -1000 to 1000, where it may be set")
}

// defaultMasqueradeBit is kube-proxy's, and the modes'.
const defaultMasqueradeBit = 14

func (k *Flags) addClient(flags *pflag.FlagSet) {
	flags.StringVar(&k.contentType, "kube-api-content-type", "application/vnd.kubernetes.protobuf", "media type of requests to the API server")
	flags.StringVar(&k.accept, "kube-api-accept-content-types", "", "media types of answers of the API server, as in the header Accept")
	flags.Float32Var(&k.qps, "kube-api-qps", 5, "requests to the API server each second, on average")
	flags.Int32Var(&k.burst, "kube-api-burst", 10, "requests to the API server at once")
	_ = flags.MarkHidden("kube-api-accept-content-types") // only a file has it
}

func (k *Flags) addLogs(flags *pflag.FlagSet) {
	flags.Int32VarP(&k.verbosity, "v", "v", 0, "verbosity of the log as of kube-proxy: from 4 on --log-level debug")
	flags.StringVar(&k.logFormat, "logging-format", "text", "--log-format with kube-proxy's name: text or json")
	flags.StringVar(&k.version, "version", "false", "print the version, and end")
	flags.Lookup("version").NoOptDefVal = "true"
}

// addAcknowledged adds flags that have no effect; --help does not show them.
func (k *Flags) addAcknowledged(flags *pflag.FlagSet) {
	flags.StringVar(&k.featureGates, "feature-gates", "", "NAME=true|false,...")
	flags.DurationVar(&k.configSync, "config-sync-period", 15*time.Minute, "")
	flags.StringVar(&k.vmodule, "vmodule", "", "PATTERN=N,...")
	flags.DurationVar(&k.flush, "log-flush-frequency", 5*time.Second, "")
	flags.BoolVar(&k.textSplit, "log-text-split-stream", false, "")
	flags.StringVar(&k.textBuffer, "log-text-info-buffer-size", "0", "")
	flags.BoolVar(&k.jsonSplit, "log-json-split-stream", false, "")
	flags.StringVar(&k.jsonBuffer, "log-json-info-buffer-size", "0", "")
	for name, why := range acknowledged {
		f := flags.Lookup(name)
		f.Usage = "no effect: " + why
		f.Hidden = name != "show-hidden-metrics-for-version"
	}
}

// dashes writes a name with dashes, as kube-proxy takes both.
func dashes(name string) string {
	out := []byte(name)
	for i, c := range out {
		if c == '_' {
			out[i] = '-'
		}
	}
	return string(out)
}

// modeNames are the modes by kube-proxy's names.
var modeNames = map[string]string{
	kubeproxyconfig.ModeIPTables: "iptables", kubeproxyconfig.ModeIPVS: "ipvs", kubeproxyconfig.ModeNFTables: "nft",
}
