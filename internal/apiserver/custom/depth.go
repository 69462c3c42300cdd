package custom

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"mime"

	"github.com/emicklei/go-restful/v3"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	extensionsserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
)

// maxDepth is how deep a body may be nested, as in JSON and YAML.
const maxDepth = 10_000

// rejectDeep answers 400 to protobuf that is nested too deep. A schema can hold
// schemas, and the generated decoder recurses into each: 450,000 of them, which
// fit into 3 MB, would overflow the stack and end the process.
func rejectDeep(limit int64) restful.FilterFunction {
	return func(r *restful.Request, w *restful.Response, next *restful.FilterChain) {
		media, _, _ := mime.ParseMediaType(r.Request.Header.Get("Content-Type"))
		if media != runtime.ContentTypeProtobuf || r.Request.Body == nil {
			next.ProcessFilter(r, w)
			return
		}
		// One byte more than the limit, so that the handler sees that it is
		// too large.
		body, err := io.ReadAll(io.LimitReader(r.Request.Body, limit+1))
		if err == nil && tooDeep(body) {
			err = apierrors.NewBadRequest(fmt.Sprintf("the object is nested more than %d levels deep", maxDepth))
		}
		if err != nil {
			responsewriters.ErrorNegotiated(err, extensionsserver.Codecs, apiextensionsv1.SchemeGroupVersion, w.ResponseWriter, r.Request)
			return
		}
		r.Request.Body = readCloser{bytes.NewReader(body), r.Request.Body}
		next.ProcessFilter(r, w)
	}
}

type readCloser struct {
	io.Reader
	io.Closer
}

// tooDeep reports whether messages in body are nested more than maxDepth levels
// deep. It takes every length-delimited field for a message, since the wire format
// does not distinguish messages from text; text that parses as messages so deep
// does not occur. It reads each byte once.
func tooDeep(body []byte) bool {
	body = bytes.TrimPrefix(body, []byte("k8s\x00"))
	ends := []int{len(body)} // of the messages that enclose at
	for at := 0; len(ends) > 0; {
		end := ends[len(ends)-1]
		if at >= end {
			at, ends = end, ends[:len(ends)-1]
			continue
		}
		tag, n := binary.Uvarint(body[at:end])
		at += n
		ok := n > 0
		switch tag & 7 {
		case 0:
			_, n = binary.Uvarint(body[at:end])
			at, ok = at+n, ok && n > 0
		case 1:
			at += 8
		case 5:
			at += 4
		case 2:
			size, n := binary.Uvarint(body[at:end])
			at += n
			if ok = ok && n > 0 && size <= uint64(end-at); ok {
				if ends = append(ends, at+int(size)); len(ends) > maxDepth {
					return true
				}
			}
		default:
			ok = false
		}
		if !ok {
			at = end // not a message after all
		}
	}
	return false
}
