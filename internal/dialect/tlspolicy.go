package dialect

import (
	"crypto/tls"
	"maps"
)

// TLSPolicy is what a TLS listener agrees to.
type TLSPolicy struct {
	// Least and Most are versions of package tls.
	Least, Most uint16
	// Suites are those of TLS 1.2 and before, nil for the library's own choice; those of TLS 1.3
	// cannot be chosen.
	Suites []uint16
}

// Suites of TLS 1.2 and before. What a policy has beside these (DHE, CCM) no library of
// this program can do.
var (
	suitesGCM = []uint16{
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
		tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
	}
	suitesForward = append(suitesGCM[:len(suitesGCM):len(suitesGCM)],
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256,
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA, tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA,
		tls.TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA, tls.TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA)
	suitesAll = append(suitesForward[:len(suitesForward):len(suitesForward)],
		tls.TLS_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_RSA_WITH_AES_256_GCM_SHA384, tls.TLS_RSA_WITH_AES_128_CBC_SHA256,
		tls.TLS_RSA_WITH_AES_128_CBC_SHA, tls.TLS_RSA_WITH_AES_256_CBC_SHA)
	// suitesAEAD12 are those of the strict policy without CBC and SHA-1.
	suitesSHA2 = append(suitesGCM[:len(suitesGCM):len(suitesGCM)],
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256)
)

// tlsPolicies are those of AWS
// (https://docs.aws.amazon.com/elasticloadbalancing/latest/application/describe-ssl-policies.html
// and https://docs.aws.amazon.com/elasticloadbalancing/latest/classic/elb-security-policy-table.html),
// of Alibaba (https://www.alibabacloud.com/help/en/slb/classic-load-balancer/user-guide/tls-security-policies), and
// least versions.
var tlsPolicies = makeTLSPolicies()

func makeTLSPolicies() map[string]TLSPolicy {
	const v10, v11, v12, v13 = tls.VersionTLS10, tls.VersionTLS11, tls.VersionTLS12, tls.VersionTLS13
	p := map[string]TLSPolicy{
		"1.0": {v10, v13, nil}, "1.1": {v11, v13, nil}, "1.2": {v12, v13, nil}, "1.3": {v13, v13, nil},
		"tls_cipher_policy_1_0": {v10, v12, suitesAll}, "tls_cipher_policy_1_1": {v11, v12, suitesAll},
		"tls_cipher_policy_1_2": {v12, v12, suitesAll}, "tls_cipher_policy_1_2_strict": {v12, v12, suitesForward},
		"tls_cipher_policy_1_2_strict_with_1_3": {v12, v13, suitesForward},
	}
	maps.Copy(p, map[string]TLSPolicy{ // of AWS, after the common beginning
		awsPolicy + "2011-08": {v10, v12, suitesAll}, awsPolicy + "2014-01": {v10, v12, suitesAll}, awsPolicy + "2014-10": {v10, v12, suitesAll},
		awsPolicy + "2015-02": {v10, v12, suitesAll}, awsPolicy + "2015-03": {v10, v12, suitesAll}, awsPolicy + "2015-05": {v10, v12, suitesAll},
		awsPolicy + "2016-08": {v10, v12, suitesAll}, awsPolicy + "TLS-1-0-2015-04": {v10, v12, suitesAll},
		awsPolicy + "TLS-1-1-2017-01": {v11, v12, suitesAll}, awsPolicy + "TLS-1-2-2017-01": {v12, v12,
			append(suitesSHA2[:len(suitesSHA2):len(suitesSHA2)],
				tls.TLS_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_RSA_WITH_AES_256_GCM_SHA384, tls.TLS_RSA_WITH_AES_128_CBC_SHA256)},
		awsPolicy + "TLS-1-2-Ext-2018-06": {v12, v12, suitesAll}, awsPolicy + "FS-2018-06": {v10, v12, suitesForward},
		awsPolicy + "FS-1-1-2019-08": {v11, v12, suitesForward}, awsPolicy + "FS-1-2-2019-08": {v12, v12, suitesForward},
		awsPolicy + "FS-1-2-Res-2019-08": {v12, v12, suitesSHA2}, awsPolicy + "FS-1-2-Res-2020-10": {v12, v12, suitesGCM},
		awsPolicy + "TLS13-1-0-2021-06": {v10, v13, suitesAll}, awsPolicy + "TLS13-1-1-2021-06": {v11, v13, suitesAll},
		awsPolicy + "TLS13-1-2-2021-06": {v12, v13, suitesSHA2}, awsPolicy + "TLS13-1-2-Res-2021-06": {v12, v13, suitesGCM},
		awsPolicy + "TLS13-1-2-Ext1-2021-06": {v12, v13, append(suitesSHA2[:len(suitesSHA2):len(suitesSHA2)],
			tls.TLS_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_RSA_WITH_AES_256_GCM_SHA384, tls.TLS_RSA_WITH_AES_128_CBC_SHA256)},
		awsPolicy + "TLS13-1-2-Ext2-2021-06": {v12, v13, suitesAll}, awsPolicy + "TLS13-1-3-2021-06": {v13, v13, nil},
	})
	return p
}

// awsPolicy begins the names of AWS's policies.
const awsPolicy = "ELBSecurityPolicy-"

// TLSPolicyOf returns a policy by its name, the default one for "".
func TLSPolicyOf(name string) (TLSPolicy, bool) {
	if name == "" {
		return TLSPolicy{tls.VersionTLS12, tls.VersionTLS13, nil}, true
	}
	p, ok := tlsPolicies[name]
	return p, ok
}
