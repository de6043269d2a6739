"""Write the sorted list of public callables of the Python 3.11 standard library.

Each line is one full name: a function or class of a module (`collections.deque`), or a public
method of such a class (`pathlib.Path.read_text`, `str.split`). Exceptions, private names and names
that a module merely imports are left out. The list is committed next to this script so that the
prompts made from it don't depend on the Python version; run it with 3.11 only to change the list.
"""

import argparse
import importlib
import re
from pathlib import Path

MODULES = """
    abc argparse array ast asyncio base64 binascii bisect builtins bz2 cProfile calendar cmath cmd
    code codecs codeop collections collections.abc colorsys concurrent.futures configparser
    contextlib contextvars copy copyreg csv curses.ascii dataclasses datetime dbm decimal difflib
    dis doctest email email.charset email.encoders email.generator email.header email.headerregistry
    email.message email.mime.application email.mime.audio email.mime.base email.mime.image
    email.mime.multipart email.mime.text email.parser email.policy email.utils enum fcntl filecmp
    fileinput fnmatch fractions ftplib functools gc getpass gettext glob graphlib grp gzip hashlib
    heapq hmac html html.parser http http.client http.cookiejar http.cookies http.server imaplib
    importlib importlib.metadata importlib.resources importlib.util inspect io ipaddress itertools
    json keyword linecache locale logging logging.config logging.handlers lzma marshal math
    mimetypes mmap multiprocessing netrc numbers operator os os.path pathlib pdb pickle pkgutil
    platform plistlib poplib pprint profile pstats pty pwd queue quopri random re readline reprlib
    resource runpy sched secrets select selectors shelve shlex shutil signal smtplib socket
    socketserver sqlite3 ssl stat statistics string struct subprocess symtable sys sysconfig syslog
    tarfile tempfile termios textwrap threading time timeit tokenize tomllib trace traceback
    tracemalloc tty types typing unicodedata unittest unittest.mock urllib.parse urllib.request uuid
    warnings wave weakref wsgiref.simple_server wsgiref.util xml.dom.minidom xml.etree.ElementTree
    xml.sax xml.sax.handler xml.sax.saxutils xmlrpc.client zipfile zlib zoneinfo
"""
PUBLIC = re.compile(r"(?!ast\.main$)[a-z]\w*(\.[A-Za-z]\w*)*(?<!Error)(?<!Warning)(?<!Exception)")


def defined_in(value, module):
    """Whether a value was defined by a module, by one of its parts or by its C half."""
    home = getattr(value, "__module__", None) or module
    return f"{home}.".startswith((f"{module}.", f"_{module}."))


def methods(cls):
    """Yield the methods that a class takes from itself, its own module or a private module."""
    for owner in cls.__mro__:
        if owner is cls or owner.__module__ == cls.__module__ or owner.__module__[0] == "_":
            for name in vars(owner):
                value = getattr(cls, name, None)
                if callable(value) and not isinstance(value, type):
                    yield name


def find_callables(module_name):
    """Yield the full names of a module's public callables and methods, but of no exceptions."""
    module = importlib.import_module(module_name)
    prefix = "" if module_name == "builtins" else f"{module_name}."
    listed = getattr(module, "__all__", None)
    for name in listed or dir(module):
        value = getattr(module, name, None)
        cls = value if isinstance(value, type) else object
        if not callable(value) or issubclass(cls, BaseException):
            continue
        if listed or defined_in(value, module_name):
            yield prefix + name
            if cls.__name__ == name and defined_in(cls, module_name.split(".")[0]):
                yield from (f"{prefix}{name}.{method}" for method in methods(cls))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="text file to write, one name per line")
    path = parser.parse_args().path
    names = {name for module in MODULES.split() for name in find_callables(module)}
    public = sorted(name for name in names if PUBLIC.fullmatch(name))
    path.write_text("\n".join(public) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
