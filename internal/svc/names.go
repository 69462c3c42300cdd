package svc

import "time"

// Domain is the API group of fairlead's own kinds, and the prefix of its labels, annotations and
// conditions.
const Domain = "fairlead.dev"

// SystemNamespace is the namespace of the objects below whose namespace is not given.
const SystemNamespace = "kube-system"

// Users and groups.
const (
	// NodeUserPrefix begins the user name of a node's certificate; the Node's name follows. NodesGroup is its group.
	NodeUserPrefix = "system:node:"
	NodesGroup     = "system:nodes"
	// NodeRegistrarRole is the ClusterRole that lets nodes register programs in a namespace.
	NodeRegistrarRole = "system:node-registrar"
	// ControllersUser and ControllersGroup are the identity of the controllers that a server runs.
	ControllersUser  = "system:fairlead-controllers"
	ControllersGroup = "system:fairlead-controllers"
	// ServerUser is the identity by which agents recognise the API server.
	ServerUser = "fairlead-apiserver"
)

// KubeProxyDevice is the network device of kube-proxy's mode ipvs, which has the addresses of all Services.
const KubeProxyDevice = "kube-ipvs0"

// Names that components send as their User-Agent and as the source of their Events.
const (
	// Controllers is also the name of their Lease.
	Controllers = "fairlead-controllers"
	// LoadBalancer is the load balancers' controller. It is also the name of its Lease and of the Secret with the
	// speakers' key.
	LoadBalancer = "fairlead-lb"
	// Speaker announces the addresses of load balancers on a node.
	Speaker = "fairlead-lb-speaker"
)

// Objects of the load balancers.
const (
	// SpeakersResource is the resource of the kind Speaker.
	SpeakersResource = "speakers"
	// SpeakerKeySecret holds the key that signs the speakers' messages.
	SpeakerKeySecret = LoadBalancer
	// VotersConfigMap lists the speakers that vote.
	VotersConfigMap = "fairlead-lb-voters"
	// WitnessLease decides between two speakers that cannot reach each other.
	WitnessLease = "fairlead-lb-witness"
	// ACMEAccountSecret holds the key of the account at the certificate authority.
	ACMEAccountSecret = "fairlead-lb-acme"
	// BGPPasswordPrefix begins the names of Secrets with passwords for BGP. Nodes may only read Secrets with it.
	BGPPasswordPrefix = "fairlead-bgp-"
	// AddressManager is the value of the label ipaddress.kubernetes.io/managed-by on the IPAddress by which
	// the load balancers' controller claims an address.
	AddressManager = "lb.fairlead.dev"
	// ClaimServicesAnnotation of a claim lists the Services that have the address: namespace/name, comma separated,
	// several if they share it. Its parentRef is the first.
	ClaimServicesAnnotation = "fairlead.dev/lb-services"
	// ClaimPoolAnnotation of a claim names the IPAddressPool that the address belongs to.
	ClaimPoolAnnotation = "fairlead.dev/lb-pool"
	// LBWeightAnnotation of an EndpointSlice is the weight of its endpoints in the proxied way of load balancers,
	// instead of WeightAnnotation.
	LBWeightAnnotation = "fairlead.dev/lb-weight"
	// ACMEIssuedAnnotation is on a Secret whose certificate is one of an authority.
	ACMEIssuedAnnotation = "fairlead.dev/acme-issued"
	// ACMEStandInName is the common name of a certificate that stands in for one that is ordered.
	ACMEStandInName = "a certificate is being ordered"
	// ACMERetryAnnotation and ACMEFailuresAnnotation of a Secret outlive the process: an authority limits how often it is
	// asked. They count for the hosts of ACMEHostsAnnotation.
	ACMERetryAnnotation    = "fairlead.dev/acme-retry-after"
	ACMEFailuresAnnotation = "fairlead.dev/acme-failures"
	ACMEHostsAnnotation    = "fairlead.dev/acme-hosts"
	// IngressService is the Service of the front of all Ingresses, in kube-system.
	IngressService = "fairlead-ingress"
	// MeshService is the Service, in kube-system, that exists while routes name Services as their parents.
	MeshService = "fairlead-mesh"
	// FrontSecretsAnnotation of the Service of a Gateway, of a ListenerSet, of a ReferenceGrant, or of all Ingresses, lists the TLS
	// Secrets that nodes need for it: namespace/name, comma separated. Of other namespaces only IngressService may name some.
	FrontSecretsAnnotation = "fairlead.dev/front-secrets"
	// FrontOrdersAnnotation of the Service of a Gateway, of a ListenerSet or of Ingresses lists the TLS Secrets whose certificates are
	// ordered by ACME, in the same form: the controllers may make and change these.
	FrontOrdersAnnotation = "fairlead.dev/front-orders"
	// FrontConfigMapsAnnotation of such a Service, or of that of a BackendTLSPolicy, lists the ConfigMaps with authorities that nodes need
	// for it, in the same form.
	FrontConfigMapsAnnotation = "fairlead.dev/front-configmaps"
	// FrontKeysAnnotation of the Service of a Gateway lists the labels and annotations that the Gateway gave it, each as
	// label:KEY or annotation:KEY, comma separated: a key that the Gateway no longer has is removed.
	FrontKeysAnnotation = "fairlead.dev/front-keys"
	// MaintenanceAnnotation of an HTTPRoute, a GRPCRoute or an Ingress has all of its requests answered with 503: "true", or the page.
	MaintenanceAnnotation = "fairlead.dev/maintenance"
	// LoadBalancerClass is the loadBalancerClass of Services that get their addresses from fairlead.
	LoadBalancerClass = "fairlead.dev/lb"
)

// Objects of every cluster.
const (
	// APIService is the Service of the API servers, in the namespace default.
	APIService = "kubernetes"
	// DNSService is the Service of the DNS servers.
	DNSService = "kube-dns"
	// DNSPort is its port, of UDP and TCP.
	DNSPort = 53
	// ServerLeasePrefix begins the names of the Leases of API servers, in kube-system.
	ServerLeasePrefix = "fairlead-apiserver-"
	// DNSPhaseAnnotation, DNSReplicasAnnotation and DNSFailureAnnotation of CoreDNS's Deployment, and ProxyFailureAnnotation of a
	// Node, are what 'fairlead migrate' has done.
	DNSPhaseAnnotation     = "fairlead.dev/dns"
	DNSReplicasAnnotation  = "fairlead.dev/dns-replicas"
	DNSFailureAnnotation   = "fairlead.dev/dns-failure"
	ProxyFailureAnnotation = "fairlead.dev/proxy-failure"
	// LBPhaseAnnotation, LBReplicasAnnotation and LBFailureAnnotation of the DaemonSet of MetalLB's speakers are the same for load
	// balancers.
	LBPhaseAnnotation    = "fairlead.dev/lb"
	LBReplicasAnnotation = "fairlead.dev/lb-replicas"
	LBFailureAnnotation  = "fairlead.dev/lb-failure"
	// LBStrategyAnnotation is the update strategy that the DaemonSet had, and LBNodeLabel the label of a node whose sessions of BGP
	// it changes.
	LBStrategyAnnotation = "fairlead.dev/lb-update-strategy"
	LBNodeLabel          = "fairlead.dev/lb"
	// EndpointAnnotation on the Lease of an API server is its address and port.
	EndpointAnnotation = "fairlead.dev/endpoint"
	// DefaultQuotaAnnotation with the value DefaultQuotaNone on a Namespace keeps it without the default quota.
	DefaultQuotaAnnotation = "fairlead.dev/default-quota"
	DefaultQuotaNone       = "none"
	// ProgrammedLease carries the versions that nodes must report once they have programmed them (package barrier).
	ProgrammedLease = "fairlead-programmed"
)

// Ports that a component listens on by default and another one knows.
const (
	// ProxyHealthPort answers /healthz of the proxy, 10256 as kube-proxy's.
	ProxyHealthPort = 10256
	// DrainPort is the port of Pods at which a kubelet asks the proxy of its node before it ends a container.
	DrainPort = 10263
	// AgentPort serves logs and exec to the API server, 10250 as a kubelet's.
	AgentPort = 10250
	// SpeakerPort is the UDP port at which the speakers of load balancers reach each other.
	SpeakerPort = 10262
)

// Labels and annotations of Nodes.
const (
	// ServingCertAnnotation on a Node is the SHA-256, in hex, of the certificate (DER) that the node's
	// agent serves with. The agent sets it; the API server accepts no other certificate from the agent.
	ServingCertAnnotation = "fairlead.dev/serving-cert-sha256"
	// AuthoritiesAnnotation on a Node, and on the Lease of a server, lists the certificate authorities that
	// it trusts and names the one that signed its certificate (pki.Report).
	AuthoritiesAnnotation = "fairlead.dev/authorities"
	// JoiningAnnotation on the Lease of kube-system in which the servers keep the rate of machines that join has the last
	// certificate requests that were let in.
	JoiningAnnotation = "fairlead.dev/joining-requests"
	// RemovedNodeLabel on a ConfigMap of the API server's namespace names a Node that was deleted, whose certificates
	// are refused; its value is NodeLabelValue (join.Removed).
	RemovedNodeLabel = "fairlead.dev/removed-node"
	// DNSServerLabel with the value "true" on a Node lets its DNS server be an endpoint of kube-dns however many nodes
	// have joined with its token. An administrator sets it; nodes cannot.
	DNSServerLabel = "fairlead.dev/dns-server"
	// NodeAddressesAnnotation on a Node lists, comma separated, the addresses that count as its own for pools of load
	// balancers. An administrator sets it; nodes cannot.
	NodeAddressesAnnotation = "fairlead.dev/node-addresses"
	// PublicKeyAnnotation on a Node is the WireGuard public key with which other nodes encrypt what they
	// send to its Pods. Its agent sets it; the API server rejects a key that another Node has.
	PublicKeyAnnotation = "fairlead.dev/wireguard-public-key"
	// PeerWatchAnnotation on a Node is "true" while its agent watches other nodes' machines
	// and lets others watch its own (docs/design/011-dead-nodes.md). The agent sets it.
	PeerWatchAnnotation = "fairlead.dev/peer-watch"
	// SuspectedAnnotation on a Node is the time at which most of its watchers did not reach
	// it. The node lifecycle controller sets it; an agent that sees a new value renews its Lease
	// at once.
	SuspectedAnnotation = "fairlead.dev/suspected"
	// UnreachableAnnotation on a node's Lease in kube-node-lease lists, comma separated, the names of the
	// nodes whose machines no longer answer that node. Its agent sets it; the node lifecycle controller
	// reads it.
	UnreachableAnnotation = "fairlead.dev/unreachable-nodes"
)

// Nodes that report that they are not Ready.
const (
	// ReasonNodeNotReady is the reason of a Pod's condition Ready while its Node is not Ready, as Kubernetes has it.
	ReasonNodeNotReady = "NodeNotReady"
	// NotReadyHold is how long a node is not Ready before its Pods leave the endpoints: some failures
	// last only a moment.
	NotReadyHold = 2 * time.Second
)

// Annotations and images of Pods.
const (
	// PodSecurityAnnotation on a Pod is the level of the Pod Security Standards that was enforced when it
	// was created: privileged, baseline or restricted. Only the API server sets it, and nothing changes
	// it; a node gives the machine's root only to Pods of the level privileged.
	PodSecurityAnnotation = "fairlead.dev/pod-security"
	// HostImage is the image that nodes run: the machine's own file system.
	HostImage = "host"
	// RegisteredImage is the image of the one container of a registered Pod. A node of an earlier
	// version does not know it, and starts nothing.
	RegisteredImage = "fairlead.dev/registered"
	// UnitAnnotation of a registered Pod names the systemd unit that the program is. This annotation and the
	// next three cannot be changed.
	UnitAnnotation = "fairlead.dev/unit"
	// PIDFileAnnotation is the absolute path of the file with the program's process ID.
	PIDFileAnnotation = "fairlead.dev/pid-file"
	// AddressAnnotation is the program's address where it is not the node's.
	AddressAnnotation = "fairlead.dev/address"
	// ServicesFileAnnotation is the file of a node's directory of services that the Pod comes from.
	ServicesFileAnnotation = "fairlead.dev/services-file"
	// DrainAnnotation of a Pod, with the value DrainOff, keeps the policy of deploy/kubernetes/drain.yaml from giving its
	// containers a preStop hook; with DrainOn they get one though none names a port.
	DrainAnnotation = "fairlead.dev/drain"
	DrainOff        = "off"
	DrainOn         = "on"
	// ProgramsAnnotation of a Pod lists programs in directories that the Pod does not see, with the SHA-256 of each,
	// as sha256sum prints them. A node shows the Pod a copy of a program whose content has this hash: who knows the
	// hash of a file has read it, so no tenant sees a file that is new to him.
	ProgramsAnnotation = "fairlead.dev/programs"
)

// Annotations of Services.
const (
	// SchedulerAnnotation of a Service names how mode ipvs chooses endpoints. Other modes ignore it.
	SchedulerAnnotation = "fairlead.dev/ipvs-scheduler"
	// ForwardingAnnotation of a Service is how packets to its external and load balancer addresses reach endpoints of other
	// nodes: ForwardingNAT or ForwardingDirect. Only mode nft can do the latter.
	ForwardingAnnotation = "fairlead.dev/forwarding"
	// ForwardingNAT: the node that gets them translates them. ForwardingDirect: it passes them on to the endpoint's node, which
	// answers the client itself (docs/design/024-direct-return.md).
	ForwardingNAT    = "nat"
	ForwardingDirect = "direct"
)

// Labels and annotations of EndpointSlices.
const (
	// ManagedBySelector is the value of the label endpointslice.kubernetes.io/managed-by on slices
	// made from a Service's selector: the conditions of their endpoints follow from the Pods.
	ManagedBySelector = "endpointslice-controller.k8s.io"
	// DNSSliceManager is the value of that label on slices that DNS servers write; other controllers leave them alone.
	DNSSliceManager = "dns.fairlead.dev"
	// NodeLabel on an EndpointSlice names the node that the slice's endpoints live and die with; its value is
	// NodeLabelValue. The DNS server of a node sets it; the node lifecycle controller marks the
	// endpoints of a node that is gone as not ready.
	NodeLabel = "fairlead.dev/node"
	// WeightAnnotation on a Pod is its share of the connections of its Services, compared with
	// the weights of others: 0 to MaxWeight, 1 without it. The EndpointSlice controller writes separate slices for each
	// weight, with the same annotation; it counts in slices made by hand, too.
	WeightAnnotation = "fairlead.dev/weight"
	// EvictedAnnotation on the Pod of a registered program is when a drain evicted it from its cordoned node. The API
	// server sets it; the node keeps the program out of Services until it is uncordoned.
	EvictedAnnotation = "fairlead.dev/evicted"
	// CheckAnnotation asks nodes to check the endpoints of a slice made by hand:
	// tcp://:PORT, http://:PORT/PATH or https://:PORT/PATH. Names of the other annotations of checks begin with it.
	CheckAnnotation = "fairlead.dev/check"
	// CheckedLabel is on slices with CheckAnnotation, so that nodes watch only these. The API server sets it.
	CheckedLabel = "fairlead.dev/checked"
	// ChecksAnnotation on a node's Lease reports the results of the node's checks, in the form of checks.Report.
	ChecksAnnotation = "fairlead.dev/checks"
)

// ProgramReturned is the condition of a Pod with EvictedAnnotation whose node was uncordoned since: the node sets it, so
// that a later cordon does not take the program out again.
const ProgramReturned = "fairlead.dev/Returned"

// Conditions of a Node that one component sets and another shows.
const (
	// ServicesProgrammed: the node's kernel has every Service.
	ServicesProgrammed = "fairlead.dev/ServicesProgrammed"
	// PodsLimited: the node enforces the resource limits of Pods.
	PodsLimited = "fairlead.dev/PodsLimited"
	// KeyAccepted, of a node that encrypts, is False while the API server rejects its PublicKeyAnnotation.
	KeyAccepted = "fairlead.dev/KeyAccepted"
	// PeersReached is True if every other node that this one asks answers it.
	PeersReached = "fairlead.dev/PeersReached"
	// PodsConfined: the node confines Pods that are not privileged.
	PodsConfined = "fairlead.dev/PodsConfined"
	// PacketsForwarded: the machine passes packets on to and from Pods.
	PacketsForwarded = "fairlead.dev/PacketsForwarded"
	// UpstreamsAnswer: the upstreams of the node's DNS server answer.
	UpstreamsAnswer = "fairlead.dev/UpstreamsAnswer"
	// NodeLocalDNS: the node's DNS server answers on the addresses of kube-dns.
	NodeLocalDNS = "fairlead.dev/NodeLocalDNS"
)
