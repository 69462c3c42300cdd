package node

// expression is what a panel shows, or what an alert compares. {} is what every dashboard puts between braces.
type expression struct{ where, text string }

// The expressions of the dashboard "Kubernetes / Proxy" and the alerts about kube-proxy in kubernetes-mixin (Apache-2.0),
// https://github.com/kubernetes-monitoring/kubernetes-mixin at aa38e2bfa7ea: dashboards/proxy.libsonnet, alerts/kube_proxy.libsonnet.
var ofProxy = []expression{
	{"Up", `sum(up{})`},
	{"Rules Sync Rate", `sum(rate(kubeproxy_sync_proxy_rules_duration_seconds_count{}[1m]))`},
	{"Rules Sync Latency", `histogram_quantile(0.99, rate(kubeproxy_sync_proxy_rules_duration_seconds_bucket{}[1m]))`},
	{"Network Programming Rate", `sum(rate(kubeproxy_network_programming_duration_seconds_count{}[1m]))`},
	{"Network Programming Latency",
		`histogram_quantile(0.99, sum(rate(kubeproxy_network_programming_duration_seconds_bucket{}[1m])) by (instance, le))`},
	{"Kube API Request Rate 2xx", `sum(rate(rest_client_requests_total{code=~"2.."}[1m]))`},
	{"Kube API Request Rate 3xx", `sum(rate(rest_client_requests_total{code=~"3.."}[1m]))`},
	{"Kube API Request Rate 4xx", `sum(rate(rest_client_requests_total{code=~"4.."}[1m]))`},
	{"Kube API Request Rate 5xx", `sum(rate(rest_client_requests_total{code=~"5.."}[1m]))`},
	{"Post Request Latency",
		`histogram_quantile(0.99, sum(rate(rest_client_request_duration_seconds_bucket{verb="POST"}[1m])) by (verb, le))`},
	{"Get Request Latency",
		`histogram_quantile(0.99, sum(rate(rest_client_request_duration_seconds_bucket{verb="GET"}[1m])) by (verb, le))`},
	{"Memory", `process_resident_memory_bytes{}`},
	{"CPU usage", `rate(process_cpu_seconds_total{}[1m])`},
	{"Goroutines", `go_goroutines{}`},
	{"KubeProxyDown", `up{}`},                     // fires when this is absent
	{"KubeProxyInstanceUnreachable", `up{} != 0`}, // fires when it is 0
}

// Those of CoreDNS in https://github.com/povilasv/coredns-mixin at eb356cfbdcb9 (Apache-2.0): dashboards/coredns.libsonnet with and
// without kubernetesPlugin, alerts/coredns.libsonnet, alerts/forward.libsonnet; and of the dashboard "Kubernetes / System / CoreDNS",
// https://grafana.com/grafana/dashboards/15762 (Apache-2.0), in https://github.com/dotdc/grafana-dashboards-kubernetes at 7fc1dc8ccd23:
// dashboards/k8s-system-coredns.json. What alerts compare is here without the bound, where the bound is far from a healthy server.
var ofDNS = []expression{
	{"instances", `coredns_build_info{}`}, // of both dashboards: without it they have no instance, or no job, to show
	{"Up", `sum(up{})`},
	{"Panics", `sum(coredns_panics_total{})`},
	{"RPC Rate", `sum(rate(coredns_dns_responses_total{}[5m])) by (rcode)`},
	{"RPC Rate forward", `sum(rate(coredns_forward_responses_total{}[5m])) by (rcode)`},
	{"Request duration", `histogram_quantile(0.99, sum(rate(coredns_dns_request_duration_seconds_bucket{}[5m])) by (server, zone, le))`},
	{"Request duration forward", `histogram_quantile(0.99, sum(rate(coredns_forward_request_duration_seconds_bucket{}[5m])) by (to, le))`},
	{"Requests (by qtype)", `sum(rate(coredns_dns_requests_total{}[5m])) by (type)`},
	{"Requests (by zone)", `sum(rate(coredns_dns_requests_total{}[5m])) by (zone)`},
	{"Forward Requests (by to)", `sum(rate(coredns_forward_requests_total{}[5m])) by (to)`},
	{"Kubernetes DNS programming duration",
		`histogram_quantile(0.99, sum(rate(coredns_kubernetes_dns_programming_duration_seconds_bucket{}[5m])) by (service_kind, le))`},
	{"Kubernetes DNS programming duration 50",
		`histogram_quantile(0.50, sum(rate(coredns_kubernetes_dns_programming_duration_seconds_bucket{}[5m])) by (service_kind, le))`},
	{"Plugins Enabled", `count(sum(coredns_plugin_enabled{}) by (name))`},
	{"Request size", `histogram_quantile(0.99, sum(rate(coredns_dns_request_size_bytes_bucket{}[5m])) by (server, zone, proto, le))`},
	{"Request size 50", `histogram_quantile(0.50, sum(rate(coredns_dns_request_size_bytes_bucket{}[5m])) by (server, zone, proto, le))`},
	{"Response size", `histogram_quantile(0.99, sum(rate(coredns_dns_response_size_bytes_bucket{}[5m])) by (server, zone, proto, le))`},
	{"Response size 50", `histogram_quantile(0.50, sum(rate(coredns_dns_response_size_bytes_bucket{}[5m])) by (server, zone, proto, le))`},
	{"Cached", `sum(coredns_cache_hits_total{}) / (sum(coredns_cache_misses_total{}) + sum(coredns_cache_hits_total{}))`},
	{"Cache hit Rate", `sum(rate(coredns_cache_hits_total{}[5m])) by (type)`},
	{"Cache hit Rate misses", `sum(rate(coredns_cache_misses_total{}[5m]))`},
	{"Cache Size", `sum(coredns_cache_entries{}) by (type)`},
	{"Memory", `process_resident_memory_bytes{}`},
	{"CPU usage", `rate(process_cpu_seconds_total{}[5m])`},
	{"Goroutines", `go_goroutines{}`},
	{"CoreDNSDown", `up{} == 1`}, // fires when this is absent
	{"CoreDNSLatencyHigh",
		`histogram_quantile(0.99, sum(rate(coredns_dns_request_duration_seconds_bucket{}[5m])) without (instance,pod))`},
	{"CoreDNSErrorsHigh", `sum without (pod, instance, server, zone, view, rcode, plugin) ` +
		`(rate(coredns_dns_responses_total{rcode="SERVFAIL"}[5m])) / ` +
		`sum without (pod, instance, server, zone, view, rcode, plugin) (rate(coredns_dns_responses_total{}[5m])) > 0.03`},
	{"CoreDNSForwardLatencyHigh",
		`histogram_quantile(0.99, sum(rate(coredns_forward_request_duration_seconds_bucket{}[5m])) without (pod, instance, rcode))`},
	{"CoreDNSForwardErrorsHigh", `sum without (pod, instance, rcode) (rate(coredns_forward_responses_total{rcode="SERVFAIL"}[5m])) / ` +
		`sum without (pod, instance, rcode) (rate(coredns_forward_responses_total{}[5m])) > 0.03`},
	{"CoreDNSForwardHealthcheckFailureCount",
		`sum without (pod, instance) (rate(coredns_forward_healthcheck_failures_total{}[5m]))`},
	{"CoreDNSForwardHealthcheckBrokenCount", `sum without (pod, instance) (rate(coredns_forward_healthcheck_broken_total{}[5m]))`},

	{"15762 Health Status", `up{}`},
	{"15762 CPU Usage", `rate(process_cpu_seconds_total{}[1m])`},
	{"15762 Total DNS Requests", `sum(rate(coredns_dns_requests_total{proto="udp"}[1m]))`},
	{"15762 Average Packet Size", `sum(rate(coredns_dns_request_size_bytes_sum{proto="udp"}[1m])) by (proto) / ` +
		`sum(rate(coredns_dns_request_size_bytes_count{proto="udp"}[1m])) by (proto)`},
	{"15762 Requests by type", `sum(rate(coredns_dns_requests_total{}[1m])) by (type)`},
	{"15762 Requests by return code", `sum(rate(coredns_dns_responses_total{}[1m])) by (rcode)`},
	{"15762 Total Forward Requests", `sum(rate(coredns_proxy_request_duration_seconds_count{proxy_name="forward"}[1m]))`},
	{"15762 DNS Errors",
		`sum(rate(coredns_proxy_request_duration_seconds_count{proxy_name="forward",rcode=~"SERVFAIL|REFUSED"}[1m])) by (rcode)`},
	{"15762 Cache Hits", `sum(rate(coredns_cache_hits_total{}[1m])) by (type)`},
	{"15762 Cache Misses", `sum(rate(coredns_cache_misses_total{}[1m])) by (type)`},
	{"15762 DNS request duration", `sum(increase(coredns_dns_request_duration_seconds_bucket{}[1m])) by (le)`},
	{"15762 DNS request size", `sum(increase(coredns_dns_request_size_bytes_bucket{le!="0"}[1m])) by (le)`},
	{"15762 DNS response size", `sum(increase(coredns_dns_response_size_bytes_bucket{le!="0"}[1m])) by (le)`},
}

// Those of Hubble's four dashboards in https://github.com/cilium/cilium (Apache-2.0), install/kubernetes/cilium/files/hubble/dashboards:
// hubble-dashboard.json at 46bea9049b46, the overview of networks at 32f7e5942d3a, of DNS at 129e87c1046d, and HTTP by workload at
// 25972d8e8c67. Bounds that a healthy cluster does not reach are left out.
var ofHubble = []expression{
	{"Flows processed Per Node avg", `avg(sum(rate(hubble_flows_processed_total{}[1m])) by (pod))`},
	{"Flows processed Per Node min", `min(sum(rate(hubble_flows_processed_total{}[1m])) by (pod))`},
	{"Flows processed Per Node max", `max(sum(rate(hubble_flows_processed_total{}[1m])) by (pod))`},
	{"Flows Types", `sum(rate(hubble_flows_processed_total{}[1m])) by (pod, type)`},
	{"L7 Flow Distribution", `sum(rate(hubble_flows_processed_total{type="L7"}[1m])) by (pod, subtype)`},
	{"Trace Flow Distribution", `sum(rate(hubble_flows_processed_total{type="Trace"}[1m])) by (pod, subtype)`},
	{"Forwarded vs Dropped", `sum(rate(hubble_flows_processed_total{}[1m])) by (pod, verdict)`},
	{"Drop Reason", `sum(rate(hubble_drop_total{}[1m])) by (pod, reason)`},
	{"Protocol Usage", `sum (rate(hubble_port_distribution_total{}[1m])) by (pod, protocol)`},
	{"Top 10 Port Distribution", `topk(10, sum (rate(hubble_port_distribution_total{port!="0"}[1m])) by (pod, port, protocol))`},
	{"TCPv4", `sum(rate(hubble_tcp_flags_total{family="IPv4"}[1m])) by (pod, flag)`},
	{"Missing TCPv4 SYN-ACKs", `sum(rate(hubble_tcp_flags_total{family="IPv4",flag="SYN"}[1m])) by (pod) - ` +
		`sum(rate(hubble_tcp_flags_total{family="IPv4",flag="SYN-ACK"}[1m])) by (pod)`},
	{"TCPv6", `sum(rate(hubble_tcp_flags_total{family="IPv6"}[1m])) by (pod, flag)`},
	{"Missing TCPv6 SYN-ACKs", `sum(rate(hubble_tcp_flags_total{family="IPv6",flag="SYN"}[1m])) by (pod) - ` +
		`sum(rate(hubble_tcp_flags_total{family="IPv6",flag="SYN-ACK"}[1m])) by (pod)`},
	{"ICMPv4", `sum(rate(hubble_icmp_total{family="IPv4"}[1m])) by (pod, type)`},
	{"Missing ICMPv4 Echo-Reply", `sum(rate(hubble_icmp_total{family="IPv4",type="EchoRequest"}[1m])) by (pod) - ` +
		`sum(rate(hubble_icmp_total{family="IPv4",type="EchoReply"}[1m])) by (pod)`},
	{"ICMPv6", `sum(rate(hubble_icmp_total{family="IPv6"}[1m])) by (pod, type)`},
	{"Missing ICMPv6 Echo-Reply", `sum(rate(hubble_icmp_total{family="IPv6",type="EchoRequest"}[1m])) by (pod) - ` +
		`sum(rate(hubble_icmp_total{family="IPv6",type="EchoReply"}[1m])) by (pod)`},
	{"Denies by Reason", `sum(rate(hubble_drop_total{reason="POLICY_DENIED"}[1m])) by (pod, reason)`},
	{"Denied Packets by Protocol", `sum(rate(hubble_drop_total{reason="POLICY_DENIED"}[1m])) by (pod, protocol)`},
	{"Top 10 Source Pods with Denied Packets", `topk(10, sum(rate(hubble_drop_total{reason="POLICY_DENIED"}[1m])) by (pod, source))`},
	{"Top 10 Destination Pods with Denied Packets",
		`topk(10, sum(rate(hubble_drop_total{reason="POLICY_DENIED"}[1m])) by (pod, destination))`},
	{"HTTP Requests", `sum(rate(hubble_http_requests_total{}[1m])) by (pod, method)`},
	{"HTTP responses", `sum(rate(hubble_http_responses_total{}[1m])) by (pod, status)`},
	{"HTTP Latency (p50)", `histogram_quantile(0.5, rate(hubble_http_request_duration_seconds_bucket{}[1m]))`},
	{"HTTP Latency (p99)", `histogram_quantile(0.99, rate(hubble_http_request_duration_seconds_bucket{}[1m]))`},
	{"HTTP Protocol Usage", `sum(rate(hubble_http_requests_total{}[5m])) by (pod, protocol)`},
	{"DNS Requests", `sum(rate(hubble_dns_queries_total{}[1m])) by (pod, qtypes)`},
	{"DNS responses", `sum(rate(hubble_dns_responses_total{rcode="No Error"}[1m])) by (pod, qtypes)`},
	{"Missing DNS Responses", `sum(rate(hubble_dns_queries_total{}[1m])) by (pod, qtypes) - ` +
		`sum(rate(hubble_dns_responses_total{}[1m])) by (pod, qtypes)`},
	{"DNS Response Record Type", `sum(rate(hubble_dns_response_types_total{}[1m])) by (pod, type)`},
	{"DNS Response IPs Returned", `sum(rate(hubble_dns_responses_total{rcode="No Error"}[1m])) by (pod,ips_returned)`},
	{"DNS Errors", `sum(rate(hubble_dns_responses_total{rcode!="No Error"}[1m])) by (pod, qtypes, rcode)`},
	{"Pods with DNS errors", `topk(10,sum(rate(hubble_dns_responses_total{rcode!="No Error"}[1m])) by (pod, destination))`},
	{"Top 10 DNS Queries per minute", `topk(10, sum(rate(hubble_dns_queries_total{}[10m])*60) by (query, qtypes))`},

	{"network: Flows processed by type", `sum(rate(hubble_flows_processed_total{}[1m])) by (type, subtype)`},
	{"network: Flows processed by verdict", `sum(rate(hubble_flows_processed_total{}[1m])) by (verdict)`},
	{"network: Top 10 sources", `topk(10, sum(rate(hubble_flows_processed_total{}[1m])) by (source))`},
	{"network: Top 10 destinations", `topk(10, sum(rate(hubble_flows_processed_total{}[1m])) by (destination))`},
	{"network: Missing TCP SYN-ACKs", `sum(rate(hubble_tcp_flags_total{flag="SYN"}[1m])) by (source) - ` +
		`sum(label_replace(sum(rate(hubble_tcp_flags_total{flag="SYN-ACK"}[1m])) by (destination), ` +
		`"source", "$1", "destination", "(.*)")) without (destination)`},
	{"network: Missing ICMP Echo Replies", `sum(rate(hubble_icmp_total{type="EchoRequest"}[1m])) by (source) - ` +
		`sum(label_replace(sum(rate(hubble_icmp_total{type="EchoReply"}[1m])) by (destination), ` +
		`"source", "$1", "destination", "(.*)")) without (destination)`},
	{"network: drops by source", `sum(rate(hubble_drop_total{}[1m])) by (source, reason) > 0`},
	{"network: drops by destination", `sum(rate(hubble_drop_total{}[1m])) by (destination, reason) > 0`},

	{"dns: DNS queries", `sum(rate(hubble_dns_queries_total{}[1m])) by (source) > 0`},
	{"dns: Top 10 DNS queries", `topk(10, sum(rate(hubble_dns_queries_total{}[1m])*60) by (query))`},
	{"dns: Missing DNS responses", `round(sum(rate(hubble_dns_queries_total{}[1m])) by (source) - ` +
		`sum(label_replace(sum(rate(hubble_dns_responses_total{}[1m])) by (destination), ` +
		`"source", "$1", "destination", "(.*)")) without (destination), 0.001)`},
	{"dns: DNS errors", `sum(rate(hubble_dns_responses_total{rcode!="No Error"}[1m])) by (destination, rcode) > 0`},

	{"http: Incoming Request Volume", `round(sum(rate(hubble_http_requests_total{reporter=~"client"}[1m])), 0.001)`},
	{"http: Incoming Request Success Rate", `sum(rate(hubble_http_requests_total{reporter="client",status!~"5.*"}[1m])) / ` +
		`sum(rate(hubble_http_requests_total{reporter="client"}[1m]))`},
	{"http: Request Duration P50", httpDuration("0.50", "")},
	{"http: Request Duration P95", httpDuration("0.95", "")},
	{"http: Request Duration P99", httpDuration("0.99", "")},
	{"http: Requests by Source", `round(sum(rate(hubble_http_requests_total{reporter="client"}[1m])) ` +
		`by (cluster, source_namespace, source_workload, status), 0.001)`},
	{"http: Success Rate By Source", httpSuccess("source")},
	{"http: Request Duration by Source P50", httpDuration("0.50", "source")},
	{"http: Request Duration by Source P95", httpDuration("0.95", "source")},
	{"http: Request Duration by Source P99", httpDuration("0.99", "source")},
	{"http: Requests by Destination", `round(sum(rate(hubble_http_requests_total{reporter="client"}[1m])) ` +
		`by (cluster, destination_namespace, destination_workload, status), 0.001)`},
	{"http: Success Rate By Destination", httpSuccess("destination")},
	{"http: Request Duration by Destination P50", httpDuration("0.50", "destination")},
	{"http: Request Duration by Destination P95", httpDuration("0.95", "destination")},
	{"http: Request Duration by Destination P99", httpDuration("0.99", "destination")},
}

// httpDuration is a quantile of the time of requests, for all or by one of their ends.
func httpDuration(quantile, end string) string {
	by := "le"
	if end != "" {
		by = "cluster, " + end + "_namespace, " + end + "_workload, le"
	}
	return "histogram_quantile(" + quantile +
		`, sum(rate(hubble_http_request_duration_seconds_bucket{reporter="client"}[1m])) by (` + by + "))"
}

// httpSuccess is the part of requests without a fault of the server, by one of their ends.
func httpSuccess(end string) string {
	by := " by (cluster, " + end + "_namespace, " + end + "_workload)"
	return `sum(rate(hubble_http_requests_total{reporter="client",status!~"5.*"}[1m]))` + by +
		` / sum(rate(hubble_http_requests_total{reporter="client"}[1m]))` + by
}

// jobs are what Prometheus scrapes, with the reasons why expressions return nothing there.
var jobs = []struct {
	name        string
	expressions []expression
	without     map[string]string
}{
	{"kube-proxy", ofProxy, map[string]string{
		"Kube API Request Rate 3xx": "the API server redirects no request of a proxy",
		"Kube API Request Rate 5xx": "the API server has no fault here",
	}},
	{"kube-dns", ofDNS, map[string]string{
		"Panics":          "without a Corefile nothing goes on after a panic",
		"Plugins Enabled": "without a Corefile there are no plugins",
	}},
	{"coredns", ofDNS, nil},
	{"hubble", ofHubble, map[string]string{
		"Missing TCPv4 SYN-ACKs":        noFlags,
		"Missing TCPv6 SYN-ACKs":        noFlags,
		"network: Missing TCP SYN-ACKs": noFlags,

		"ICMPv4":                             noICMP,
		"Missing ICMPv4 Echo-Reply":          noICMP,
		"ICMPv6":                             noICMP,
		"Missing ICMPv6 Echo-Reply":          noICMP,
		"network: Missing ICMP Echo Replies": noICMP,

		"Denies by Reason":                            noPolicies,
		"Denied Packets by Protocol":                  noPolicies,
		"Top 10 Source Pods with Denied Packets":      noPolicies,
		"Top 10 Destination Pods with Denied Packets": noPolicies,
	}},
}

// Reasons of several panels.
const (
	noFlags    = "a flow is a connection's first packet, or an answer to it without its flags"
	noICMP     = "flows are of TCP, UDP and SCTP"
	noPolicies = "nodes enforce no NetworkPolicy"
)
