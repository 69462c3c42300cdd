package dialect

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
