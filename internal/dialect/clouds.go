package dialect

import "strconv"

// The dialects with few annotations.

// openstackDialect has the annotations of the OpenStack cloud provider.
func openstackDialect() Dialect {
	const (
		prefix = "loadbalancer.openstack.org/"
		noNets = "there are no networks, ports and floating IPs of OpenStack; addresses come from IPAddressPools"
	)
	d := Dialect{
		Name: "OpenStack",
		Source: "https://github.com/kubernetes/cloud-provider-openstack/blob/master/docs/" +
			"openstack-cloud-controller-manager/expose-applications-using-loadbalancer-type-service.md",
		Prefixes: []string{prefix, "service.beta.kubernetes.io/openstack-"},
		Annotations: []Annotation{
			internal("service.beta.kubernetes.io/openstack-internal-load-balancer", "110", []string{"true"}, []string{"false"}),
			addresses(prefix+"load-balancer-address", 0),
			number(prefix+"connection-limit", -1, 1000000, "connections", FieldConnections, func(s *Spec, n int) { s.ConnectionLimit = max(n, 0) }),
			word(prefix+"proxy-protocol", map[string]int{"true": 1, "v1": 1, "v2": 2, "false": 0}, FieldProxyProtocol, 0,
				func(s *Spec, v int) { s.ProxyProtocol = v }).of("173"),
			{Key: prefix + "x-forwarded-for", Values: "true, false", Sets: []Field{FieldHeaders}, read: func(r *reader, v string) error {
				on, err := strconv.ParseBool(v)
				if err == nil && on { // makes a listener of HTTP, as Octavia's controller does
					r.set(FieldHeaders, "X-Forwarded-For", func(*Spec) { r.raw.offered = HTTP })
				} else if err == nil {
					r.same(FieldHeaders, v)
				}
				return err
			}},
			flag(prefix+"enable-health-monitor", FieldHealthEnabled, true, setChecked),
			seconds(prefix+"health-monitor-delay", 1, 300, FieldHealthInterval, setInterval),
			seconds(prefix+"health-monitor-timeout", 1, 60, FieldHealthTimeout, setTimeout),
			number(prefix+"health-monitor-max-retries", 1, 10, "", FieldHealthHealthy, setHealthy),
			number(prefix+"health-monitor-max-retries-down", 1, 10, "", FieldHealthUnhealthy, setUnhealthy),
			certificates(prefix+"default-tls-container-ref",
				"the name of a TLS Secret of the namespace, or a URL whose last component is one", "http://", "https://"),
			nodeSelector(prefix+"node-selector", "key=value pairs with commas between"),
			none(prefix+"keep-floatingip", noNets),
		},
	}
	for _, k := range []string{"floating-network-id", "floating-subnet", "floating-subnet-id", "floating-subnet-tags", "class", "subnet-id",
		"member-subnet-id", "network-id", "port-id", "flavor-id", "availability-zone", "load-balancer-id", "hostname"} {
		d.Annotations = append(d.Annotations, none(prefix+k, noNets))
	}
	for _, k := range []string{"timeout-client-data", "timeout-member-connect", "timeout-member-data", "timeout-tcp-inspect"} {
		d.Annotations = append(d.Annotations, none(prefix+k, "one idle timeout counts for both directions: use "+lbPrefix+"idle-timeout"))
	}
	return d
}

func metallbDialect() Dialect {
	d := Dialect{Name: "MetalLB", Source: "https://metallb.io/usage/", Prefixes: []string{"metallb.io/", "metallb.universe.tf/"}}
	for _, prefix := range d.Prefixes { // of today, and of before
		d.Annotations = append(d.Annotations,
			addresses(prefix+"loadBalancerIPs", 0),
			text(prefix+"address-pool", "the name of an IPAddressPool", FieldPool, func(s *Spec, v string) { s.Pool = v }),
			text(prefix+"allow-shared-ip", "any", FieldSharingKey, func(s *Spec, v string) { s.SharingKey = v }),
			none(prefix+"ip-allocated-from-pool", "it is what MetalLB records for itself; 'fairlead lb status' shows the pool"),
		)
	}
	return d
}

func kubevipDialect() Dialect {
	const (
		prefix   = "kube-vip.io/"
		records  = "it is what kube-vip records for itself; 'fairlead lb status' shows the node"
		byDHCP   = "it is for addresses by DHCP; here they come from IPAddressPools"
		noEgress = "fairlead does not choose the source addresses of Pods' own connections"
	)
	d := Dialect{
		Name: "kube-vip", Source: "https://kube-vip.io/docs/usage/kubernetes-services/", Prefixes: []string{prefix},
		Annotations: []Annotation{
			addresses(prefix+"loadbalancerIPs", 0),
			none(prefix+"ignore", "a Service that fairlead should not serve has a spec.loadBalancerClass of another program"),
			none(prefix+"loadbalancerHostname", byDHCP),
			none(prefix+"serviceInterface", "the IPAddressPool has the interfaces"),
			none(prefix+"leaseName", "nodes agree on who answers for each address without a Lease"),
			none(prefix+"forwardUPNP", "fairlead does not configure routers by UPnP"),
			none(prefix+"upnp-lease-duration", "fairlead does not configure routers by UPnP"),
			none(prefix+"flush-conntrack", "the proxy removes the entries of endpoints that have gone"),
			none(prefix+"serviceVLAN", "the IPAddressPool has the interfaces, which the machine sets up"),
			none(prefix+"macvlanName", byDHCP),
			none(prefix+"dhcp-broadcast", byDHCP),
			none(prefix+"ddns", byDHCP),
			none(prefix+"rp_filter", "the machine's own setting of its interfaces stays"),
			none(prefix+"ignore-service-security", "spec.loadBalancerSourceRanges always has effect; leave it empty to let all clients in"),
			none(prefix+"forcePerServiceElection", "each address has its own node in any case"),
			none(prefix+"allow-reconcile-without-endpoints", "a Service without endpoints keeps its address, and refuses connections"),
		},
	}
	for _, k := range []string{"vipHost", "hwaddr", "requestedIP", "active-endpoint", "active-endpoint-ipv6"} {
		d.Annotations = append(d.Annotations, none(prefix+k, records))
	}
	for _, k := range []string{"", "-ipv6", "-internal", "-destination-ports", "-source-ports", "-allowed-networks", "-denied-networks",
		"-no-internal-traffic", "-detect-api-server", "-nftables-table"} {
		d.Annotations = append(d.Annotations, none(prefix+"egress"+k, noEgress))
	}
	return d
}

func gcpDialect() Dialect {
	const noNetwork = "there are no networks, tiers and reserved addresses of Google Cloud; addresses come from IPAddressPools"
	return Dialect{
		Name: "Google Cloud", Source: "https://cloud.google.com/kubernetes-engine/docs/concepts/service-load-balancer-parameters",
		Prefixes: []string{"cloud.google.com/", "networking.gke.io/", "alpha.cloud.google.com/"},
		Annotations: []Annotation{
			internal("networking.gke.io/load-balancer-type", "107", []string{"internal"}, []string{"external"}),
			internal("cloud.google.com/load-balancer-type", "107", []string{"internal"}, []string{"external"}),
			none("networking.gke.io/internal-load-balancer-allow-global-access", noNetwork),
			none("networking.gke.io/internal-load-balancer-subnet", noNetwork),
			none("networking.gke.io/load-balancer-ip-addresses", noNetwork+"; use "+LBAddresses),
			none("networking.gke.io/weighted-load-balancing", "connections go to Pods, so that each Pod has the same share"),
			none("cloud.google.com/network-tier", noNetwork),
			none("cloud.google.com/l4-rbs", "it chooses a kind of Google's backend"),
			none("alpha.cloud.google.com/load-balancer-backend-share", "each Service has its own Pods"),
			none("cloud.google.com/load-balancer-backend-share", "each Service has its own Pods"),
			tags("cloud.google.com/load-balancer-resource-labels"),
			none("networking.gke.io/backend-service", "it is what GKE records for itself"),
			none("networking.gke.io/target-pool", "it is what GKE records for itself"),
			none("cloud.google.com/neg", "Pods stand behind the load balancer in any case"),
			none("cloud.google.com/neg-status", "it is what GKE records for itself"),
			none("cloud.google.com/backend-config", "it is for Ingress"), none("beta.cloud.google.com/backend-config", "it is for Ingress"),
			none("cloud.google.com/app-protocols", "it is for Ingress"),
		},
	}
}

func tencentDialect() Dialect {
	const prefix = "service.kubernetes.io/"
	return Dialect{
		Name:   tencentName,
		Source: "https://github.com/kubernetes/website/blob/release-1.18/content/en/docs/concepts/services-networking/service.md",
		Prefixes: []string{
			prefix + "qcloud-", prefix + "tke-", prefix + "service.", prefix + "loadbalance-", prefix + "local-svc-", tencentConfig,
		},
		Annotations: []Annotation{
			internal(prefix+"qcloud-loadbalancer-internal-subnetid", "112", nil, nil),
			nodeSelector(prefix+"qcloud-loadbalancer-backends-label", "a set-based selector of nodes, as: key in (a, b)").of("142"),
			sharedBy(prefix + "tke-existed-lbid").of("143"),
			none(prefix+"service.extensiveParameters", "they are parameters of Tencent's API for making an instance").of("144"),
			tencentListenerParameters().of("145"),
			later(tencentConfig, "the name of a TkeServiceConfig", FieldHealthEnabled,
				"a TkeServiceConfig is not read: write what it says as "+tencentListeners),
			none(tencentConfig+"-auto", "there are no objects of kind TkeServiceConfig"),
			none(prefix+"loadbalance-type", "there is one kind of load balancer, which does what both do").of("146"),
			none(prefix+"qcloud-loadbalancer-internet-charge-type", "it is not billed").of("147"),
			number(prefix+"qcloud-loadbalancer-internet-max-bandwidth-out", 1, 2000, "Mbit/s", FieldBandwidth, setBandwidth).of("148"),
			flag(prefix+"local-svc-only-bind-node-with-pod", FieldOnlyWithPod, false,
				func(s *Spec, on bool) { s.OnlyNodesWithPod = on }).of("149, 182, 183"),
		},
	}
}

func ibmDialect() Dialect {
	const prefix = "service.kubernetes.io/ibm-load-balancer-cloud-provider-"
	const noVLAN = "there are no VLANs, zones and subnets of IBM Cloud; addresses come from IPAddressPools"
	return Dialect{
		Name: "IBM Cloud", Source: "https://cloud.ibm.com/docs/containers?topic=containers-loadbalancer", Prefixes: []string{prefix},
		Annotations: []Annotation{
			internal(prefix+"ip-type", "113", []string{"private"}, []string{"public"}),
			none(prefix+"vlan", noVLAN), none(prefix+"zone", noVLAN), none(prefix+"vpc-subnets", noVLAN), none(prefix+"vpc-lb-name", noVLAN),
			none(prefix+"enable-features", "addresses are announced by ARP, NDP or BGP, and forwarded by the node's proxy"),
			word(prefix+"scheduler", map[string]Balance{"rr": RoundRobin, "sh": SourceHash}, FieldBalance, "", setBalance),
		},
	}
}

func baiduDialect() Dialect {
	const prefix = "service.beta.kubernetes.io/cce-load-balancer-"
	const noVPC = "there are no instances of Baidu AI Cloud; addresses come from IPAddressPools"
	return Dialect{
		Name: "Baidu AI Cloud", Source: "https://cloud.baidu.com/doc/CCE/s/yjxppt74z", Prefixes: []string{prefix},
		Annotations: []Annotation{
			internal(prefix+"internal-vpc", "111", []string{"true"}, []string{"false"}),
			none(prefix+"id", noVPC),
		},
	}
}
