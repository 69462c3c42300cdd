package dialect

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
