package api

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// Scheme knows the types of the Gateway API.
var Scheme = newScheme()

func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	if err := gwv1.Install(s); err != nil {
		panic(err) // the types do not depend on the environment
	}
	return s
}

type (
	// ClassClient is a typed client like the ones of client-go, for GatewayClasses.
	ClassClient = gentype.ClientWithList[*gwv1.GatewayClass, *gwv1.GatewayClassList]
	// GatewayClient is one for Gateways.
	GatewayClient = gentype.ClientWithList[*gwv1.Gateway, *gwv1.GatewayList]
	// RouteClient is one for HTTPRoutes.
	RouteClient = gentype.ClientWithList[*gwv1.HTTPRoute, *gwv1.HTTPRouteList]
	// CallClient is one for GRPCRoutes.
	CallClient = gentype.ClientWithList[*gwv1.GRPCRoute, *gwv1.GRPCRouteList]
	// GrantClient is one for ReferenceGrants.
	GrantClient = gentype.ClientWithList[*gwv1.ReferenceGrant, *gwv1.ReferenceGrantList]
	// TLSRouteClient is one for TLSRoutes.
	TLSRouteClient = gentype.ClientWithList[*gwv1.TLSRoute, *gwv1.TLSRouteList]
	// TCPRouteClient is one for TCPRoutes.
	TCPRouteClient = gentype.ClientWithList[*gwv1.TCPRoute, *gwv1.TCPRouteList]
	// UDPRouteClient is one for UDPRoutes.
	UDPRouteClient = gentype.ClientWithList[*gwv1.UDPRoute, *gwv1.UDPRouteList]
	// SetClient is one for ListenerSets.
	SetClient = gentype.ClientWithList[*gwv1.ListenerSet, *gwv1.ListenerSetList]
	// PolicyClient is one for BackendTLSPolicies.
	PolicyClient = gentype.ClientWithList[*gwv1.BackendTLSPolicy, *gwv1.BackendTLSPolicyList]
)

// Client is a client of the Gateway API.
type Client struct {
	rest  rest.Interface
	codec runtime.ParameterCodec
}

// NewClient returns a client for the API server of config, which is not changed. It speaks JSON, as custom resources do.
func NewClient(config *rest.Config) (*Client, error) {
	config = rest.CopyConfig(config)
	config.APIPath, config.GroupVersion = "/apis", &schema.GroupVersion{Group: gwv1.GroupName, Version: "v1"}
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	config.NegotiatedSerializer = serializer.NewCodecFactory(Scheme).WithoutConversion()
	c, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, err
	}
	return &Client{c, runtime.NewParameterCodec(Scheme)}, nil
}

// Classes returns the client of GatewayClasses.
func (c *Client) Classes() *ClassClient {
	return gentype.NewClientWithList("gatewayclasses", c.rest, c.codec, "",
		func() *gwv1.GatewayClass { return &gwv1.GatewayClass{} }, func() *gwv1.GatewayClassList { return &gwv1.GatewayClassList{} })
}

// Gateways returns the client of the Gateways of a namespace, or of all.
func (c *Client) Gateways(namespace string) *GatewayClient {
	return gentype.NewClientWithList("gateways", c.rest, c.codec, namespace,
		func() *gwv1.Gateway { return &gwv1.Gateway{} }, func() *gwv1.GatewayList { return &gwv1.GatewayList{} })
}

// Routes returns the client of the HTTPRoutes of a namespace, or of all.
func (c *Client) Routes(namespace string) *RouteClient {
	return gentype.NewClientWithList("httproutes", c.rest, c.codec, namespace,
		func() *gwv1.HTTPRoute { return &gwv1.HTTPRoute{} }, func() *gwv1.HTTPRouteList { return &gwv1.HTTPRouteList{} })
}

// Calls returns the client of the GRPCRoutes of a namespace, or of all.
func (c *Client) Calls(namespace string) *CallClient {
	return gentype.NewClientWithList("grpcroutes", c.rest, c.codec, namespace,
		func() *gwv1.GRPCRoute { return &gwv1.GRPCRoute{} }, func() *gwv1.GRPCRouteList { return &gwv1.GRPCRouteList{} })
}

// Grants returns the client of the ReferenceGrants of a namespace, or of all.
func (c *Client) Grants(namespace string) *GrantClient {
	return gentype.NewClientWithList("referencegrants", c.rest, c.codec, namespace,
		func() *gwv1.ReferenceGrant { return &gwv1.ReferenceGrant{} }, func() *gwv1.ReferenceGrantList { return &gwv1.ReferenceGrantList{} })
}

// TLSRoutes returns the client of the TLSRoutes of a namespace, or of all.
func (c *Client) TLSRoutes(namespace string) *TLSRouteClient {
	return gentype.NewClientWithList("tlsroutes", c.rest, c.codec, namespace,
		func() *gwv1.TLSRoute { return &gwv1.TLSRoute{} }, func() *gwv1.TLSRouteList { return &gwv1.TLSRouteList{} })
}

// TCPRoutes returns the client of the TCPRoutes of a namespace, or of all.
func (c *Client) TCPRoutes(namespace string) *TCPRouteClient {
	return gentype.NewClientWithList("tcproutes", c.rest, c.codec, namespace,
		func() *gwv1.TCPRoute { return &gwv1.TCPRoute{} }, func() *gwv1.TCPRouteList { return &gwv1.TCPRouteList{} })
}

// UDPRoutes returns the client of the UDPRoutes of a namespace, or of all.
func (c *Client) UDPRoutes(namespace string) *UDPRouteClient {
	return gentype.NewClientWithList("udproutes", c.rest, c.codec, namespace,
		func() *gwv1.UDPRoute { return &gwv1.UDPRoute{} }, func() *gwv1.UDPRouteList { return &gwv1.UDPRouteList{} })
}

// Sets returns the client of the ListenerSets of a namespace, or of all.
func (c *Client) Sets(namespace string) *SetClient {
	return gentype.NewClientWithList("listenersets", c.rest, c.codec, namespace,
		func() *gwv1.ListenerSet { return &gwv1.ListenerSet{} }, func() *gwv1.ListenerSetList { return &gwv1.ListenerSetList{} })
}

// Policies returns the client of the BackendTLSPolicies of a namespace, or of all.
func (c *Client) Policies(namespace string) *PolicyClient {
	return gentype.NewClientWithList("backendtlspolicies", c.rest, c.codec, namespace,
		func() *gwv1.BackendTLSPolicy { return &gwv1.BackendTLSPolicy{} },
		func() *gwv1.BackendTLSPolicyList { return &gwv1.BackendTLSPolicyList{} })
}
