package dialect

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
