package dialect

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
)

const (
	tke     = "service.kubernetes.io/"
	certARN = "arn:aws:acm:us-east-1:123456789012:certificate/12345678-1234-1234-1234-123456789012"
)

// web is a Service with two ports.
func web(pairs ...string) Service {
	s := Service{Annotations: map[string]string{}, Ports: []Port{{"http", 80, "TCP", ""}, {"https", 443, "TCP", ""}}}
	for i := 0; i < len(pairs); i += 2 {
		s.Annotations[pairs[i]] = pairs[i+1]
	}
	return s
}

// states returns what became of each annotation, by its key.
func states(r *Reading) map[string][]State {
	out := map[string][]State{}
	for _, f := range r.Findings {
		out[f.Annotation] = append(out[f.Annotation], f.State)
	}
	return out
}

// The values of the documents, and what they are in a Spec.
func TestAnnotationsOfTheDocuments(t *testing.T) {
	spec := func(pairs ...string) *Spec { return &Read(web(pairs...)).Spec }
	aws := func(pairs ...string) *Spec {
		for i := 0; i < len(pairs); i += 2 {
			pairs[i] = awsPrefix + pairs[i]
		}
		return spec(pairs...)
	}
	protocols := func(s *Spec) string {
		var out []string
		for _, l := range s.Listeners {
			out = append(out, string(l.Protocol)+">"+string(l.Backend))
		}
		return strings.Join(out, " ")
	}
	const cert = "ssl-cert"
	for _, c := range []struct {
		behaviour string
		got, want any
	}{
		{"107", spec("cloud.google.com/load-balancer-type", "Internal").Internal, true},
		{"107", spec("networking.gke.io/load-balancer-type", "Internal").Internal, true},
		{"108", aws("internal", "0.0.0.0/0").Internal, true},
		{"108", aws("internal", "0.0.0.0/0").SourceRanges, nil},
		{"108", aws("internal", "false").Internal, false},
		{"108", aws("internal", "").Internal, false},
		{"109", spec(beta+"azure-load-balancer-internal", "true").Internal, true},
		{"110", spec(beta+"openstack-internal-load-balancer", "true").Internal, true},
		{"111", spec(beta+"cce-load-balancer-internal-vpc", "true").Internal, true},
		{"112", spec(tke+"qcloud-loadbalancer-internal-subnetid", "subnet-xxxxx").Internal, true},
		{"113", spec(tke+"ibm-load-balancer-cloud-provider-ip-type", "private").Internal, true},
		{"114", spec(beta+"alibaba-cloud-loadbalancer-address-type", "intranet").Internal, true},
		{"138", Read(web(awsPrefix+"type", "nlb")).Way, Direct}, // which keeps the client's address
		{"139", Read(web(awsPrefix+"type", "nlb", awsPrefix+"nlb-target-type", "instance")).Way, Direct},
		{"115", aws(cert, certARN).Certificates[0], "12345678-1234-1234-1234-123456789012"},
		{"115", aws(cert, "arn:aws:iam::123456789012:server-certificate/Web").Certificates[0], "web"},
		{"116", protocols(aws(cert, certARN)), "tls>tcp tls>tcp"},
		{"116", protocols(aws(cert, certARN, "backend-protocol", "ssl")), "tls>tls tls>tls"},
		{"116", protocols(aws(cert, certARN, "backend-protocol", "https")), "https>https https>https"},
		{"117", protocols(aws(cert, certARN, "backend-protocol", "http")), "https>http https>http"},
		{"117", protocols(aws("backend-protocol", "http")), "http>http http>http"},
		{"118", protocols(aws(cert, certARN, "backend-protocol", "tcp")), "tls>tcp tls>tcp"},
		{"118", protocols(aws("backend-protocol", "ssl")), "tcp>tcp tcp>tcp"},
		{"119", protocols(aws(cert, certARN, "ssl-ports", "443,8443", "backend-protocol", "http")), "http>http https>http"},
		{"119", protocols(aws(cert, certARN, "ssl-ports", "https")), "tcp>tcp tls>tcp"},
		{"119", protocols(aws(cert, certARN, "ssl-ports", "*")), "tls>tcp tls>tcp"},
		{"119", protocols(aws(cert, certARN, "ssl-ports", "")), "tls>tcp tls>tcp"},
		{"120", aws("ssl-negotiation-policy", "ELBSecurityPolicy-TLS-1-2-2017-01").TLSPolicy, "ELBSecurityPolicy-TLS-1-2-2017-01"},
		{"121", aws("proxy-protocol", "*").ProxyProtocol, 1},
		{"121", aws("proxy-protocol", "*", "type", "nlb").ProxyProtocol, 2},
		{"122", aws("access-log-enabled", "true").AccessLog.Enabled, true},
		{"123", aws("access-log-emit-interval", "60").AccessLog.Every.Std(), time.Hour},
		{"124", aws("access-log-s3-bucket-name", "my-bucket").AccessLog.Bucket, "my-bucket"},
		{"125", aws("access-log-s3-bucket-prefix", "my-bucket-prefix/prod").AccessLog.Prefix, "my-bucket-prefix/prod"},
		{"124", aws("access-log-enabled", "true", "access-log-s3-bucket-name", "my-bucket").AccessLog.Secret, DefaultLogSecret},
		{"124", spec(lbPrefix+"access-log-bucket", "b-1", lbPrefix+"access-log-credentials", "s3").AccessLog.Secret, "s3"},
		{"126", aws("connection-draining-enabled", "false").Draining, false},
		{"126", aws("connection-draining-enabled", "true").Draining, true},
		{"127", aws("connection-draining-timeout", "60").DrainTimeout.Std(), time.Minute},
		{"128", aws("connection-idle-timeout", "60").IdleTimeout.Std(), time.Minute},
		{"129", aws("cross-zone-load-balancing-enabled", "false").CrossZone, false},
		{"130", aws("additional-resource-tags", "environment=prod,owner=devops").Tags, map[string]string{"environment": "prod",
			"owner": "devops"}},
		{"130", aws("additional-resource-tags", "a=,b").Tags, map[string]string{"a": "", "b": ""}},
		{"131", aws("healthcheck-healthy-threshold", "").Health.Healthy, 2},
		{"131", aws("healthcheck-healthy-threshold", "10").Health.Healthy, 10},
		{"132", aws().Health.Unhealthy, 6},
		{"132", aws("healthcheck-unhealthy-threshold", "3").Health.Unhealthy, 3},
		{"133", aws().Health.Interval.Std(), 10 * time.Second},
		{"133", aws("healthcheck-interval", "20").Health.Interval.Std(), 20 * time.Second},
		{"134", aws().Health.Timeout.Std(), 5 * time.Second},
		{"134", aws("healthcheck-interval", "5").Health.Timeout.Std(), 4 * time.Second}, // the default adapts
		{"134", aws("healthcheck-timeout", "6").Health.Timeout.Std(), 6 * time.Second},
		{"136", aws("type", "nlb").Health.Unhealthy, 3},
		{"136", aws("type", "nlb").Health.Interval.Std(), 30 * time.Second},
		{"140", aws("type", "nlb", "internal", "true").Internal, true},
		{"142", spec(tke+"qcloud-loadbalancer-backends-label", "key in (value1, value2)").BackendNodes, "key in (value1, value2)"},
		{"143", spec(tke+"tke-existed-lbid", "lb-6swtxxxx").SharingKey, "lb-6swtxxxx"},
		{"177", spec(beta+"alibaba-cloud-loadbalancer-id", "lb-1").SharingKey, "lb-1"},
		{"148", spec(tke+"qcloud-loadbalancer-internet-max-bandwidth-out", "10").BandwidthMbps, 10},
		{"170", protocols(spec()), "tcp>tcp tcp>tcp"},
		{"171", protocols(&Read(Service{Ports: []Port{{"dns", 53, "UDP", ""}}}).Spec), "udp>udp"},
		{"172", protocols(spec(lbPrefix+"protocol", "http")), "http>http http>http"},
		{"173", spec(lbPrefix+"proxy-protocol", "v1").ProxyProtocol, 1},
	} {
		got, _ := json.Marshal(c.got)
		want, _ := json.Marshal(c.want)
		if string(got) != string(want) {
			t.Errorf("behaviour %s: %s, want %s", c.behaviour, got, want)
		}
	}
}

// Values out of range are reported with what is allowed.
func TestWrongValues(t *testing.T) {
	for _, c := range []struct{ key, value, says string }{
		{awsPrefix + "healthcheck-healthy-threshold", "1", `"1" is not a number from 2 to 10`},
		{awsPrefix + "healthcheck-unhealthy-threshold", "11", "from 2 to 10"},
		{awsPrefix + "healthcheck-interval", "4", "from 5 to 300 seconds"},
		{awsPrefix + "healthcheck-timeout", "61", "from 2 to 60 seconds"},
		{awsPrefix + "healthcheck-timeout", "10", "must be less than their interval, which is 10s"},
		{awsPrefix + "access-log-emit-interval", "10", "neither 5 nor 60"},
		{awsPrefix + "access-log-enabled", "yes", "not one of false, true"},
		{awsPrefix + "access-log-s3-bucket-name", "evil.example:80/a", "is not the name of a bucket"},
		{awsPrefix + "access-log-s3-bucket-name", "-ab", "is not the name of a bucket"},
		{awsPrefix + "access-log-s3-bucket-prefix", "a/../b", "is not the beginning of names"},
		{awsPrefix + "access-log-s3-bucket-prefix", "a?acl", "is not the beginning of names"},
		{awsPrefix + "attributes", "access_logs.s3.bucket=A", "access_logs.s3.bucket: "},
		{lbPrefix + "access-log-credentials", "other/secret", "is not the name of a Secret"},
		{lbPrefix + "access-log-format", "nlb", "not one of alb, elb"},
		{LBACMEHosts, "a.example", "needs fairlead.dev/lb-tls-secrets: the first Secret gets the certificate"},
		{LBACMEHosts, "*.example", "is not a host name"},
		{LBACMEHosts, "a.*.example.com", "is not a host name"},
		{LBACMEChallenge, "http-01", "needs fairlead.dev/lb-acme-hosts"},
		{LBACMEChallenge, "tls-sni-01", "not one of dns-01, http-01, tls-alpn-01"},
		{LBACMEHosts, "localhost", "is not a host name"},
		{LBACMEHosts, "192.0.2.1", "is not a host name"},
		{LBACMEHosts, strings.Repeat("a.", 127) + "example", "is not a host name"},
		{awsPrefix + "backend-protocol", "grpc", "not one of http, https, ssl, tcp"},
		{awsPrefix + "proxy-protocol", "443", "the only value that is allowed"},
		{awsPrefix + "ssl-negotiation-policy", "best", "is not one of 1.0, 1.1"},
		{awsPrefix + "ssl-cert", "arn:aws:acm:a:1:certificate/", "names no Secret"},
		{awsPrefix + "ssl-cert", "a b", "cannot be the name of a Secret"},
		{awsPrefix + "ssl-ports", "8443", `the Service has no port "8443"`},
		{awsPrefix + "additional-resource-tags", "=prod", "a value without a key"},
		{awsPrefix + "type", "alb", "not one of nlb"},
		{tke + "qcloud-loadbalancer-internet-max-bandwidth-out", "2001", "from 1 to 2000 Mbit/s"},
		{tke + "local-svc-only-bind-node-with-pod", "1", "not one of false, true"},
		{lbPrefix + "protocol", "443=quic", "not one of http, https, tcp, tls"},
		{lbPrefix + "protocol", "8080=http", `the Service has no port "8080"`},
		{lbPrefix + "protocol", "tls", "needs a certificate: name TLS Secrets by fairlead.dev/lb-tls-secrets"},
		{lbPrefix + "trusted-fronts", "all", "is not a network like"},
		{beta + "azure-load-balancer-internal", "yes", "not one of true, false"},
		{beta + "azure-load-balancer-ipv4", "2001:db8::1", "is not an IPv4 address"},
		{"networking.gke.io/load-balancer-type", "outside", "not one of internal, external"},
		{lbPrefix + "idle-timeout", strings.Repeat("9", 100000), "from 1 to 86400 seconds"},
	} {
		r := Read(web(c.key, c.value))
		i := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.State == Invalid })
		if i < 0 || !strings.Contains(r.Findings[i].Text, c.says) || len(r.Findings[i].Text) > 2000 {
			t.Errorf("%s: %.50q: %+v, want %q", c.key, c.value, r.Findings, c.says)
		}
	}
}

// What has no meaning here says why, and never more.
func TestMeaninglessAnnotations(t *testing.T) {
	for _, c := range []struct{ behaviour, key, value, says string }{
		{"135", awsPrefix + "extra-security-groups", "sg-53fae93f,sg-42efd82e", "IPAddressPools"},
		{"144", tke + "service.extensiveParameters", "", "Tencent's API"},
		{"146", tke + "loadbalance-type", "classic", "one kind"},
		{"147", tke + "qcloud-loadbalancer-internet-charge-type", "TRAFFIC_POSTPAID_BY_HOUR", "not billed"},
	} {
		r := Read(web(c.key, c.value))
		if len(r.Findings) != 1 || r.Findings[0].State != Meaningless || !strings.HasPrefix(r.Findings[0].Text,
			"accepted; has no meaning here because ") ||
			!strings.Contains(r.Findings[0].Text, c.says) {
			t.Errorf("behaviour %s: %+v", c.behaviour, r.Findings)
		}
	}
}

func TestUnknownAnnotations(t *testing.T) {
	for key, says := range map[string]string{
		awsPrefix + "ssl-certs":                               "no annotation of AWS; is " + awsPrefix + "ssl-cert meant?",
		awsPrefix + "connection-draning-enabled":              "is " + awsPrefix + "connection-draining-enabled meant?",
		lbPrefix + "tls-secret":                               "is " + LBTLSSecrets + " meant?",
		"metallb.io/address-pol":                              "is metallb.io/address-pool meant?",
		lbPrefix + "quantum-entanglement":                     "is no annotation of fairlead",
		tke + "qcloud-loadbalancer-intenet-max-bandwidth-out": "is " + tke + "qcloud-loadbalancer-internet-max-bandwidth-out meant?",
	} {
		r := Read(web(key, "x"))
		if len(r.Findings) != 1 || r.Findings[0].State != Unknown || !strings.Contains(r.Findings[0].Text, says) {
			t.Errorf("%s: %+v, want %q", key, r.Findings, says)
		}
	}
	if r := Read(web("example.com/team", "shop", "kubectl.kubernetes.io/last-applied-configuration", "{}", beta+"something-else",
		"")); len(r.Findings) > 0 {
		t.Errorf("annotations of others: %+v", r.Findings)
	}
}

// Ours comes before a cloud's, and the loser hears of it.
func TestSeveralAnnotationsOfOneField(t *testing.T) {
	r := Read(web(lbPrefix+"idle-timeout", "5", awsPrefix+"connection-idle-timeout", "60"))
	if got := r.Spec.IdleTimeout.Std(); got != 5*time.Second || !slices.Contains(states(r)[awsPrefix+"connection-idle-timeout"], Overridden) {
		t.Errorf("%s, %+v", got, r.Findings)
	}
	if o := r.Origins[FieldIdleTimeout]; o.From != lbPrefix+"idle-timeout" || o.Value != "5 seconds" {
		t.Errorf("%+v", o)
	}
	r = Read(web(beta+"azure-load-balancer-ipv4", "192.0.2.1", beta+"azure-load-balancer-ipv6", "2001:db8::1"))
	if len(r.Spec.Addresses) != 2 || r.AddressErr != nil {
		t.Errorf("%v, %v", r.Spec.Addresses, r.AddressErr)
	}
}

// Every annotation of the tables is read without a panic, says what became of it, and is there
// once; one that sets nothing says why.
func TestTables(t *testing.T) {
	seen, numbers := map[string]bool{}, map[string]bool{}
	for _, d := range dialects {
		for _, a := range d.Annotations {
			if seen[a.Key] {
				t.Errorf("%s is there twice", a.Key)
			}
			seen[a.Key] = true
			if (a.None == "") == (a.read == nil) || a.Values == "" || a.None == "" && len(a.Sets) == 0 {
				t.Errorf("%s: neither read nor explained", a.Key)
			}
			if !slices.ContainsFunc(d.Prefixes, func(p string) bool { return strings.HasPrefix(a.Key, p) }) && d.Name != "AWS" &&
				d.Name != "Google Cloud" &&
				a.Key != beta+"backend-type" {
				t.Errorf("%s has no prefix of %s", a.Key, d.Name)
			}
			for n := range strings.SplitSeq(a.Behaviour, ", ") {
				numbers[n] = true
			}
			for _, v := range []string{"", "true", "1", "5", "100", "on", "*", "a=b", "192.0.2.1", "tcp", "\x00", "x,,="} {
				key := strings.ReplaceAll(a.Key, "*", "80_x")
				if r := Read(web(key, v)); len(states(r)[key]) == 0 {
					t.Errorf("%s: %q: nothing is said about it", key, v)
				}
			}
		}
	}
	for n := 106; n <= 149; n++ {
		// Not about one annotation: 137 to 141 are about what a Network Load Balancer is.
		if n >= 137 && n <= 141 {
			continue
		}
		if !numbers[strconv.Itoa(n)] {
			t.Errorf("behaviour %d is of no annotation", n)
		}
	}
}

// No annotation that the sources of these projects name is missing.
func TestAnnotationsOfCloudProviders(t *testing.T) {
	for _, c := range []struct {
		module, dir string
		least       int
		is          *regexp.Regexp
	}{
		{"k8s.io/cloud-provider-aws", "pkg/providers/v1", 30, regexp.MustCompile(`^service\.beta\.kubernetes\.io/aws-load-balancer-`)},
		{"go.universe.tf/metallb", "controller", 8, regexp.MustCompile(`^metallb\.(io|universe\.tf)/.`)},
	} {
		found := stringConstants(t, filepath.Join(testbed.ModuleDir(t, filepath.Join("..", "..", "test", "clouds"), c.module), c.dir))
		count := 0
		for _, text := range found {
			if !c.is.MatchString(text) {
				continue
			}
			count++
			if _, known := lookUp(text); !known {
				t.Errorf("%s: %s is not in the tables", c.module, text)
			}
		}
		if count < c.least {
			t.Errorf("%s: only %d annotations found", c.module, count)
		}
	}
}

// No annotation is missing of those controllers either whose modules cannot be imported.
func TestAnnotationsOfOtherControllers(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "annotations.txt"))
	if err != nil {
		t.Fatal(err)
	}
	count := 0
	for key := range strings.Lines(string(text)) {
		if key = strings.TrimSpace(key); key == "" || strings.HasPrefix(key, "#") {
			continue
		}
		count++
		if _, known := lookUp(key); !known {
			t.Errorf("%s is not in the tables", key)
		}
	}
	if count < 150 {
		t.Errorf("only %d annotations found", count)
	}
}

// stringConstants returns the values of the constants of a package, those that are put
// together of others included.
func stringConstants(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no files in %s: %v", dir, err)
	}
	consts := map[string]ast.Expr{}
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, spec := range g.Specs {
				v := spec.(*ast.ValueSpec)
				for i, n := range v.Names {
					if i < len(v.Values) {
						consts[n.Name] = v.Values[i]
					}
				}
			}
		}
	}
	var eval func(ast.Expr, int) string
	eval = func(e ast.Expr, depth int) string {
		switch e := e.(type) {
		case *ast.BasicLit:
			s, _ := strconv.Unquote(e.Value)
			return s
		case *ast.Ident:
			if of := consts[e.Name]; of != nil && depth < 10 {
				return eval(of, depth+1)
			}
		case *ast.BinaryExpr:
			return eval(e.X, depth+1) + eval(e.Y, depth+1)
		}
		return ""
	}
	var out []string
	for _, e := range consts {
		out = append(out, eval(e, 0))
	}
	return out
}

// Whatever is written into annotations, Read gives a whole Spec and bounded text.
func FuzzRead(f *testing.F) {
	f.Add(awsPrefix+"ssl-ports", "443,https,,", LBTLSSecrets, "a,b", "192.0.2.1", "http", uint16(80))
	f.Add(lbPrefix+"protocol", "443=tls,=", awsPrefix+"target-group-attributes", "a=b,=,proxy_protocol_v2.enabled=true", "x", "", uint16(0))
	f.Add("service.beta.kubernetes.io/port_80_health-probe_interval", "5", "metallb.io/loadBalancerIPs", "::1", "", "a", uint16(9))
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2, ip, name string, port uint16) {
		r := Read(Service{Annotations: map[string]string{k1: v1, k2: v2}, LoadBalancerIP: ip, Ports: []Port{{name, port, "TCP", ""}}})
		if h := r.Spec.Health; len(r.Spec.Listeners) != 1 || h.Healthy < 1 || h.Unhealthy < 1 || h.Timeout <= 0 || h.Interval <= 0 ||
			r.Spec.Balance == "" {
			t.Errorf("%+v", r.Spec)
		}
		if l := r.Spec.Listeners[0]; l.Protocol == "" || l.Backend == "" || l.Protocol.IsTLS() && len(r.Spec.Certificates) == 0 && !r.Invalid() {
			t.Errorf("%+v", l)
		}
		for _, f := range r.Findings {
			if len(f.Text) > 3000+2*len(f.Annotation) {
				t.Errorf("a text of %d bytes", len(f.Text))
			}
		}
	})
}
