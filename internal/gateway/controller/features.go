package controller

import (
	"slices"
	"strings"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// SupportedFeatures are the features of the Gateway API whose conformance tests pass, sorted, and its core features, for the
// status of a GatewayClass. The tests take from it what to test (make conformance). experimental adds what needs fields of the
// experimental channel: without them the API server drops these.
func SupportedFeatures(experimental bool) (out []gwv1.SupportedFeature) {
	list := []features.FeatureName{
		features.SupportGateway, features.SupportReferenceGrant, features.SupportHTTPRoute,
		features.SupportGatewayPort8080, features.SupportGatewayHTTPListenerIsolation,
		features.SupportGatewayInfrastructure, features.SupportGatewayAddressEmpty, features.SupportGatewayStaticAddresses,
		features.SupportGatewayHTTPSListenerDetectMisdirectedRequests,
		features.SupportHTTPRouteBackendRequestHeaderModification, features.SupportHTTPRouteQueryParamMatching,
		features.SupportHTTPRouteMethodMatching, features.SupportHTTPRouteResponseHeaderModification, features.SupportHTTPRoutePortRedirect,
		features.SupportHTTPRouteSchemeRedirect, features.SupportHTTPRoutePathRedirect, features.SupportHTTPRouteHostRewrite,
		features.SupportHTTPRoutePathRewrite, features.SupportHTTPRouteRequestTimeout, features.SupportHTTPRouteBackendTimeout,
		features.SupportHTTPRouteParentRefPort, features.SupportHTTPRouteDestinationPortMatching, features.SupportHTTPRouteBackendProtocolH2C,
		features.SupportHTTPRouteBackendProtocolWebSocket, features.SupportHTTPRouteNamedRouteRule, features.SupportHTTPRouteCORS,
		features.SupportHTTPRoute303RedirectStatusCode, features.SupportHTTPRoute307RedirectStatusCode,
		features.SupportHTTPRoute308RedirectStatusCode, features.SupportHTTPRouteRequestMirror,
		features.SupportHTTPRouteRequestMultipleMirrors, features.SupportHTTPRouteRequestPercentageMirror,
		features.SupportGRPCRoute, features.SupportGRPCRouteNamedRouteRule,
		features.SupportTLSRoute, features.SupportTLSRouteModeTerminate, features.SupportTLSRouteModeMixed,
		features.SupportTCPRoute, features.SupportUDPRoute, features.SupportListenerSet,
		features.SupportBackendTLSPolicy, features.SupportBackendTLSPolicySANValidation, features.SupportGatewayBackendClientCertificate,
		features.SupportGatewayFrontendClientCertificateValidation,
		features.SupportGatewayFrontendClientCertificateValidationInsecureFallback,
	}
	if experimental {
		list = append(list, features.SupportHTTPRouteRetry, features.SupportHTTPRouteRetryBackendTimeout,
			features.SupportHTTPRouteRetryConnectionError)
	}
	return featuresOf(list...)
}

// MeshFeatures are the same of routes with Services as parents. No GatewayClass may list the ones of meshes.
func MeshFeatures() []gwv1.SupportedFeature {
	return featuresOf(
		features.SupportMesh, features.SupportHTTPRoute, features.SupportGRPCRoute, features.SupportReferenceGrant,
		features.SupportMeshClusterIPMatching, features.SupportMeshHTTPRouteRewritePath, features.SupportMeshHTTPRouteSchemeRedirect,
		features.SupportMeshHTTPRouteRedirectPort, features.SupportMeshHTTPRouteRedirectPath,
		features.SupportMeshHTTPRouteBackendRequestHeaderModification, features.SupportMeshHTTPRouteQueryParamMatching,
		features.SupportMeshHTTPRouteNamedRouteRule, features.SupportHTTPRouteParentRefPort,
		features.SupportHTTPRouteResponseHeaderModification, features.SupportHTTPRoute303RedirectStatusCode,
		features.SupportHTTPRoute307RedirectStatusCode, features.SupportHTTPRoute308RedirectStatusCode,
	)
}

func featuresOf(names ...features.FeatureName) (out []gwv1.SupportedFeature) {
	for _, f := range names {
		out = append(out, gwv1.SupportedFeature{Name: gwv1.FeatureName(f)})
	}
	slices.SortFunc(out, func(a, b gwv1.SupportedFeature) int { return strings.Compare(string(a.Name), string(b.Name)) })
	return out
}
