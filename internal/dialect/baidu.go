package dialect

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
