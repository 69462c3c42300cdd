package lb

// What the controller and the speakers agree on.
const (
	// ManagedBy is the value of label networkingv1.LabelManagedBy
	// (ipaddress.kubernetes.io/managed-by) on the IPAddress objects by which the
	// controller claims addresses. An address is announced while such an object exists.
	ManagedBy = "lb.fairlead.dev"
	// ServicesAnnotation of a claim lists the Services that have the address, as
	// namespace/name, comma separated: several if they share it. Its parentRef is the first.
	ServicesAnnotation = "fairlead.dev/lb-services"
	// PoolAnnotation of a claim is the name of the IPAddressPool that the address is of.
	PoolAnnotation = "fairlead.dev/lb-pool"
	// VotersName is the ConfigMap with the list of voters, and KeyName the Secret with the key of the
	// speakers' messages, both in Namespace.
	VotersName = "fairlead-lb-voters"
	KeyName    = "fairlead-lb"
	// VotersEntry is the entry of the ConfigMap: quorum.Lists as JSON.
	VotersEntry = "lists"
	// Namespace is where the ConfigMap, the Secret and the Leases are.
	Namespace = "kube-system"
	// KeyBytes is the length of a key. The one that signs is the Secret's entry "key"; messages that are signed with one of
	// its other entries are accepted, too.
	KeyBytes = 32
	KeyEntry = "key"
)
