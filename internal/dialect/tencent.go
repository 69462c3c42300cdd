package dialect

func tencentDialect() Dialect {
	const prefix = "service.kubernetes.io/"
	return Dialect{
		Name:     "Tencent Cloud",
		Source:   "https://github.com/kubernetes/website/blob/release-1.18/content/en/docs/concepts/services-networking/service.md",
		Prefixes: []string{prefix + "qcloud-", prefix + "tke-", prefix + "service.", prefix + "loadbalance-", prefix + "local-svc-"},
		Annotations: []Annotation{
			internal(prefix+"qcloud-loadbalancer-internal-subnetid", "112", nil, nil),
			nodeSelector(prefix+"qcloud-loadbalancer-backends-label", "a set-based selector of nodes, as: key in (a, b)").of("142"),
			sharedBy(prefix + "tke-existed-lbid").of("143"),
			none(prefix+"service.extensiveParameters", "they are parameters of Tencent's API for making an instance").of("144"),
			none(prefix+"service.listenerParameters", "they are parameters of Tencent's API for listeners").of("145"),
			none(prefix+"loadbalance-type", "there is one kind of load balancer, which does what both do").of("146"),
			none(prefix+"qcloud-loadbalancer-internet-charge-type", "it is not billed").of("147"),
			number(prefix+"qcloud-loadbalancer-internet-max-bandwidth-out", 1, 2000, "Mbit/s", FieldBandwidth, setBandwidth).of("148"),
			flag(prefix+"local-svc-only-bind-node-with-pod", FieldOnlyWithPod, false,
				func(s *Spec, on bool) { s.OnlyNodesWithPod = on }).of("149, 182, 183"),
		},
	}
}
