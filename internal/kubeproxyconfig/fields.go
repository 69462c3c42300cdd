package kubeproxyconfig

// The modes as a KubeProxyConfiguration names them.
const (
	ModeIPTables = "iptables"
	ModeIPVS     = "ipvs"
	ModeNFTables = "nftables"
)

// field is a field of a KubeProxyConfiguration, by its path, with the flag that has the same effect.
type field struct {
	path string
	// flag is the one of 'fairlead proxy', which has kube-proxy's name if kube-proxy has one; empty if only
	// a note is left of the field.
	flag string
	// pointer fields have no default value: kube-proxy tells a zero from nothing.
	pointer bool
	// modes are the ones in which kube-proxy uses the field; nil is all of them.
	modes []string
	// note is what a field without an effect means here.
	note string
	// check returns what is wrong with a value; nil takes all.
	check func(string) error
}

// noMode is the mode of a file that names none.
const noMode = ""

var (
	likeIPTables = []string{noMode, ModeIPTables}
	notNFTables  = []string{noMode, ModeIPTables, ModeIPVS}
	onlyIPVS     = []string{ModeIPVS}
	onlyNFTables = []string{ModeNFTables}
)

// What fields without an effect mean here.
const (
	noteWindows   = "it is for Windows"
	notePortRange = "kube-proxy does not use it either"
)

// fields are all fields of a KubeProxyConfiguration.
var fields = []field{
	{path: "featureGates", flag: "feature-gates"},

	{path: "clientConnection.kubeconfig", flag: "kubeconfig"},
	{path: "clientConnection.acceptContentTypes", flag: "kube-api-accept-content-types"},
	{path: "clientConnection.contentType", flag: "kube-api-content-type"},
	{path: "clientConnection.qps", flag: "kube-api-qps", check: number},
	{path: "clientConnection.burst", flag: "kube-api-burst", check: within(0, 1<<31-1)},

	{path: "logging.format", flag: "logging-format", check: oneOf("text", "json")},
	{path: "logging.flushFrequency", flag: "log-flush-frequency"},
	{path: "logging.verbosity", flag: "v", check: within(0, 1<<31-1)},
	{path: "logging.vmodule", flag: "vmodule"},
	{path: "logging.options.text.splitStream", flag: "log-text-split-stream"},
	{path: "logging.options.text.infoBufferSize", flag: "log-text-info-buffer-size"},
	{path: "logging.options.json.splitStream", flag: "log-json-split-stream"},
	{path: "logging.options.json.infoBufferSize", flag: "log-json-info-buffer-size"},

	{path: "hostnameOverride", flag: "hostname-override"},
	{path: "bindAddress", flag: "bind-address", check: address},
	{path: "healthzBindAddress", flag: "healthz-bind-address", check: addressAndPort},
	{path: "metricsBindAddress", flag: "metrics-bind-address", check: addressAndPort},
	{path: "bindAddressHardFail", flag: "bind-address-hard-fail"},
	{path: "enableProfiling", flag: "profiling"},
	{path: "showHiddenMetricsForVersion", flag: "show-hidden-metrics-for-version", check: HiddenMetricsVersion},

	{path: "mode", flag: "proxy-mode", check: oneOf(ModeIPTables, ModeIPVS, ModeNFTables)},
	{path: "iptables.masqueradeBit", flag: "iptables-masquerade-bit", pointer: true, modes: notNFTables, check: within(0, 31)},
	{path: "iptables.masqueradeAll", flag: "masquerade-all", modes: notNFTables},
	{path: "iptables.localhostNodePorts", flag: "iptables-localhost-nodeports", pointer: true},
	{path: "iptables.syncPeriod", flag: "iptables-sync-period", modes: likeIPTables, check: positive},
	{path: "iptables.minSyncPeriod", flag: "iptables-min-sync-period", modes: likeIPTables, check: notNegative},
	{path: "ipvs.syncPeriod", flag: "ipvs-sync-period", modes: onlyIPVS, check: positive},
	{path: "ipvs.minSyncPeriod", flag: "ipvs-min-sync-period", modes: onlyIPVS, check: notNegative},
	{path: "ipvs.scheduler", flag: "ipvs-scheduler", modes: onlyIPVS},
	{path: "ipvs.excludeCIDRs", flag: "ipvs-exclude-cidrs", modes: onlyIPVS, check: prefix},
	{path: "ipvs.strictARP", flag: "ipvs-strict-arp", modes: onlyIPVS},
	{path: "ipvs.tcpTimeout", flag: "ipvs-tcp-timeout", modes: onlyIPVS, check: notNegative},
	{path: "ipvs.tcpFinTimeout", flag: "ipvs-tcpfin-timeout", modes: onlyIPVS, check: notNegative},
	{path: "ipvs.udpTimeout", flag: "ipvs-udp-timeout", modes: onlyIPVS, check: notNegative},
	{path: "nftables.masqueradeBit", flag: "iptables-masquerade-bit", pointer: true, modes: onlyNFTables, check: within(0, 31)},
	{path: "nftables.masqueradeAll", flag: "masquerade-all", modes: onlyNFTables},
	{path: "nftables.syncPeriod", flag: "iptables-sync-period", modes: onlyNFTables, check: positive},
	{path: "nftables.minSyncPeriod", flag: "iptables-min-sync-period", modes: onlyNFTables, check: notNegative},
	{path: "winkernel.networkName", note: noteWindows},
	{path: "winkernel.sourceVip", note: noteWindows},
	{path: "winkernel.enableDSR", note: noteWindows},
	{path: "winkernel.rootHnsEndpointName", note: noteWindows},
	{path: "winkernel.forwardHealthCheckVip", note: noteWindows},

	{path: "detectLocalMode", flag: "detect-local-mode", check: oneOf(LocalModes...)},
	{path: "detectLocal.bridgeInterface", flag: "pod-bridge-interface"},
	{path: "detectLocal.interfaceNamePrefix", flag: "pod-interface-name-prefix"},
	{path: "clusterCIDR", flag: "cluster-cidr", check: prefixes},
	{path: "nodePortAddresses", flag: "nodeport-addresses", check: nodePortAddress},

	{path: "oomScoreAdj", flag: "oom-score-adj", pointer: true, check: within(-1000, 1000)},
	{path: "conntrack.maxPerCore", flag: "conntrack-max-per-core", pointer: true, check: within(0, 1<<31-1)},
	{path: "conntrack.min", flag: "conntrack-min", pointer: true, check: within(0, 1<<31-1)},
	{path: "conntrack.tcpEstablishedTimeout", flag: "conntrack-tcp-timeout-established", pointer: true, check: notNegative},
	{path: "conntrack.tcpCloseWaitTimeout", flag: "conntrack-tcp-timeout-close-wait", pointer: true, check: notNegative},
	{path: "conntrack.tcpBeLiberal", flag: "conntrack-tcp-be-liberal"},
	{path: "conntrack.udpTimeout", flag: "conntrack-udp-timeout", check: notNegative},
	{path: "conntrack.udpStreamTimeout", flag: "conntrack-udp-timeout-stream", check: notNegative},
	{path: "configSyncPeriod", flag: "config-sync-period", check: positive},
	{path: "portRange", note: notePortRange},
	{path: "windowsRunAsService", note: noteWindows},
}

// LocalModes are the values of detectLocalMode.
var LocalModes = []string{"ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"}
